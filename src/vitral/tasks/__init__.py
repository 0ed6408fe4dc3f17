"""What a task is: head, target, loss, metric, decoding. One file each; the loop and the predictor know none of them."""

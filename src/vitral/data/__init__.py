"""Files to tensors: reading, decoding, augmenting, batching. Knows no network."""

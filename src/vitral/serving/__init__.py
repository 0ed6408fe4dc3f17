"""The server: HTTP, batches of what comes together, and a page to try a model on."""

"""Embeddings that are kept, and which of them lie near."""

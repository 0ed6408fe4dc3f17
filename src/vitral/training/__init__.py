"""Training: one loop that knows nothing of ViTs or tasks, and what it needs."""

"""Models side by side: trained on growing shares of the same data with the same budget, then measured and reported."""

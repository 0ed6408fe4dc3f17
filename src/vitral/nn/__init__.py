"""The mathematics in small parts. Knows no configuration and no model."""

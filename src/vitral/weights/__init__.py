"""Weights in files: reading and writing them. Published layouts will join the one of a run directory."""

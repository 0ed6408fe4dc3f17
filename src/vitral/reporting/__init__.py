"""Reports: a run directory as a page."""

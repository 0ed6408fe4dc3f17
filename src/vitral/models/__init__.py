"""Models made of the parts in `vitral.nn`, their named sizes and what they cost."""

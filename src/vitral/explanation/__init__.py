"""What a model looks at, and how far one may believe it."""

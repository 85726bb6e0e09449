"""Lines to facts, one module a source. Importing this package imports nothing."""

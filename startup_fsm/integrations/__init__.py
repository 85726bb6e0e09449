"""Other people's systems: each module needs its extra. Importing this package imports nothing."""

"""Views of a journal: read only. Import the one you need; importing this package imports nothing."""

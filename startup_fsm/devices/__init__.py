"""Devices: the only door to memory. Import the one you need; importing this package imports nothing."""

"""Engines that we start: one that computes, one that only counts bytes. Importing this package imports nothing."""

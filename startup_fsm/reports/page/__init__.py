"""The report: one HTML file that needs nothing but a browser. Importing this package imports nothing."""

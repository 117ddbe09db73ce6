"""The shared Redis tier."""

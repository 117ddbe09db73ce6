"""Snapshot of a domain at one moment: typed and frozen."""

"""Decisions: one pure function a kind, from a snapshot of the world to a plan of what to write."""

"""Decisions: one pure function per kind, from a snapshot of the world to a plan of writes."""

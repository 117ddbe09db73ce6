"""Requests of callers on their way to the engine."""

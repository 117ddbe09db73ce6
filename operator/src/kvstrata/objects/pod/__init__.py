"""Builders for the pods of a CachedModel and the objects beside them."""

"""Builders for the servers of a managed CacheTier."""

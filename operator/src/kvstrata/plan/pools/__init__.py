"""Prefix pools: content, readers, rendering, shards."""

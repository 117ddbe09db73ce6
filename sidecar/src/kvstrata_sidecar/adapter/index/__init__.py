"""Index of blocks by scope, and eviction from it: shared by memory and files."""

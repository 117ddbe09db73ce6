"""`kubectl kvstrata size`: sizes of a model's KV cache, and when restoring it pays."""

"""Names and bytes in tiers: Redis keys and scripts, values, block files."""

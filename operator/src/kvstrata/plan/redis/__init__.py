"""Redis tiers: external servers, managed clusters, their passwords and certificates."""

"""The policy in force: watched bundles, API keys, grants, freshness."""

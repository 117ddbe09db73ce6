"""Observed state of Redis servers: clusters, credentials, external servers."""

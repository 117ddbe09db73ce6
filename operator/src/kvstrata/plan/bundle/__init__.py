"""Bundles: compiled from policies, committed to shards, enforced by pods."""

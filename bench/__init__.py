"""Benchmarks: each measures a claim against a baseline in the same run, and compares it with a checked-in range."""

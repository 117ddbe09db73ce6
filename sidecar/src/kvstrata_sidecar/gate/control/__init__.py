"""Requests of the operator: state, erasure, keys, probes, warming."""

"""LMCache 0.5.6, and the vLLM that it was built for."""

"""Time to delete index entries from a tier of several primaries and to prove it, and its cost for the servers."""

from bench.erase.compare import measure

__all__ = ["measure"]

"""How long it takes to delete index entries from a tier of several primaries and to show it, and what it costs them."""

from bench.erase.compare import measure

__all__ = ["measure"]

"""What the policy adapter costs beside LMCache's own Redis client, through the interface by which LMCache uses both."""

from bench.adapter.compare import measure

__all__ = ["measure"]

"""Hits that neighbours lose to a tenant that scans, under kvstrata's budgets and under one shared LRU."""

from bench.neighbours.compare import measure

__all__ = ["measure"]

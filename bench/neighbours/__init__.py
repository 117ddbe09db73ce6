"""What a tenant that scans costs its neighbours, under kvstrata's budgets and under one shared LRU."""

from bench.neighbours.compare import measure

__all__ = ["measure"]

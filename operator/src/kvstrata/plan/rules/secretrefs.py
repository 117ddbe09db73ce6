"""Secrets that users may name: their own, never the operator's.

Whoever may write a CachedModel chooses images that mount what it names. The domain key, the operator's authority and
the passwords of tiers stand in Secrets of the same namespace, and would be his for the asking.
"""

from __future__ import annotations

from collections.abc import Iterable

RESERVED_PREFIXES = ("kvstrata-", "kvs-")


def reserved(names: Iterable[str | None]) -> str | None:
    """Return the first name that belongs to the operator, or None."""
    return next((name for name in names if name and name.startswith(RESERVED_PREFIXES)), None)


def sentence(name: str, field: str) -> str:
    """Return what to tell the user."""
    return f"{field} names Secret {name}, which is the operator's own: use a Secret whose name begins neither with " + (
        " nor with ".join(RESERVED_PREFIXES)
    )

"""Whether the server has already what the operator wants, so that a pass over a settled world writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.contract.canonical import digest

APPLIED = "kvstrata.io/applied"
"""Annotation with the digest of what was last applied: a field that is no longer wanted shows by it."""


def stamped(desired: Mapping[str, Any]) -> dict[str, Any]:
    """Return `desired` with the annotation that names its digest."""
    metadata = dict(desired["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), APPLIED: digest(desired)[:16]}
    return {**desired, "metadata": metadata}


def is_applied(live: Mapping[str, Any] | None, desired: Mapping[str, Any]) -> bool:
    """Whether `live` came from exactly this stamped `desired` and nobody has changed one of its fields since."""
    if live is None:
        return False
    stamp = desired["metadata"]["annotations"][APPLIED]
    if (live["metadata"].get("annotations") or {}).get(APPLIED) != stamp:
        return False
    return contains(live, desired)


def contains(live: Any, desired: Any) -> bool:
    """Whether every field of `desired` is in `live` with the same value; the server may have added others.

    Lists must have the same length, because the server adds to the items of our lists but never adds items.
    """
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            contains(live.get(name), value) for name, value in desired.items() if value not in (None, {}, [])
        )
    if isinstance(desired, list | tuple):
        if not isinstance(live, list) or len(live) != len(desired):
            return False
        return all(contains(a, b) for a, b in zip(live, desired, strict=True))
    return bool(live == desired) or (desired in ("", 0, False) and live is None)

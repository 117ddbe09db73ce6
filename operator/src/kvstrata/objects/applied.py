"""Whether the API server already has the desired object, so that a settled pass writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstrata.contract.wire import digest
from kvstrata.model.memo import Memo

APPLIED = "kvstrata.io/applied"
"""Annotation with the digest of the last applied object: it reveals fields that are no longer desired."""


def stamped(desired: Mapping[str, Any]) -> dict[str, Any]:
    metadata = dict(desired["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), APPLIED: digest(desired)[:16]}
    return {**desired, "metadata": metadata}


def is_applied(live: Mapping[str, Any] | None, desired: Mapping[str, Any]) -> bool:
    """Whether `live` came from exactly this stamped `desired` and none of its fields has changed since."""
    if live is None:
        return False
    stamp = desired["metadata"]["annotations"][APPLIED]
    if (live["metadata"].get("annotations") or {}).get(APPLIED) != stamp:
        return False
    return contains(live, desired)


def missing(memo: Memo, live: Mapping[str, Any] | None, desired: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the stamped `desired` if it is still to be applied, else None. Memoized for the same pair of objects."""
    kind, name = desired["kind"], desired["metadata"]["name"]
    wanted = memo.get((stamped, kind), name, (desired,), lambda: stamped(desired))
    return None if memo.get((is_applied, kind), name, (live, wanted), lambda: is_applied(live, wanted)) else wanted


def contains(live: Any, desired: Any) -> bool:
    """Whether every field of `desired` is in `live` with the same value; the server may have added others. Lists must
    have equal length: the server adds fields to items of our lists, but never items."""
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            contains(live.get(name), value) for name, value in desired.items() if value not in (None, {}, [])
        )
    if isinstance(desired, list | tuple):
        if not isinstance(live, list) or len(live) != len(desired):
            return False
        return all(contains(a, b) for a, b in zip(live, desired, strict=True))
    return bool(live == desired) or (desired in ("", 0, False) and live is None)


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls and empty values, as the apiserver does."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}

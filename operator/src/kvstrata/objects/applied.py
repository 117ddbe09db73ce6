"""Whether the server has already what the operator wants, so that a pass over a settled world writes nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from kvstrata.contract.wire import digest
from kvstrata.model.memo import Memo

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


def missing(memo: Memo, live: Mapping[str, Any] | None, desired: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the stamped `desired` if it is still to be applied, None if `live` came from it and is as it was.

    The answer is known already while both are the same objects as before.
    """
    of_stamp, of_answer = memo_names(desired["kind"], desired["metadata"]["name"])
    wanted = memo.get(of_stamp, (desired,), lambda: stamped(desired))
    return None if memo.get(of_answer, (live, wanted), lambda: is_applied(live, wanted)) else wanted


def memo_names(kind: str, name: str) -> tuple[Hashable, Hashable]:
    """Return the names under which `missing` keeps what it knows of an object."""
    return (stamped, kind, name), (is_applied, kind, name)


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

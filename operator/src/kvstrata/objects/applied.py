"""Whether the API server already has the desired object, so that a settled pass writes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvstrata.contract.wire import digest
from kvstrata.model.memo import Memo
from kvstrata.model.refs import FIELD_MANAGER_PREFIX

APPLIED = "kvstrata.io/applied"
"""Annotation with the digest of the last applied object: it reveals fields that are no longer desired."""


TEMPLATE = "template"
_KEYS = ("mountPath", "name", "containerPort")
"""Fields that name the items of lists in a pod template, as the API server merges them."""


def stamped(desired: Mapping[str, Any]) -> dict[str, Any]:
    metadata = dict(desired["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), APPLIED: digest(desired)[:16]}
    return {**desired, "metadata": metadata}


def is_applied(
    live: Mapping[str, Any] | None, desired: Mapping[str, Any], rewritten: Mapping[str, Any] | None = None
) -> bool:
    """Whether `live` came from exactly this stamped `desired` and none of its fields has changed since. `rewritten`:
    those fields as the API server answered the write, where an admission webhook changed them."""
    if live is None:
        return False
    if not has_stamp_of(live, desired):
        return False
    if contains(live, desired):
        return True
    return rewritten is not None and has_stamp_of(rewritten, desired) and part_of(live, desired) == rewritten


def missing(
    memo: Memo,
    live: Mapping[str, Any] | None,
    desired: Mapping[str, Any],
    rewritten: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """Return the stamped `desired` if it is still to be applied, else None. Memoized for the same objects."""
    kind, name = desired["kind"], desired["metadata"]["name"]
    wanted = memo.get((stamped, kind), name, (desired,), lambda: stamped(desired))
    inputs = (live, wanted, rewritten)
    return None if memo.get((is_applied, kind), name, inputs, lambda: is_applied(*inputs)) else wanted


def contains(live: Any, desired: Any, *, in_template: bool = False) -> bool:
    """Whether every field of `desired` is in `live` with the same value. Others may have added fields, and to the named
    lists of a pod template items, as webhooks inject containers: the API server merges both by their owners. Other
    lists have equal length."""
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            contains(live.get(name), value, in_template=in_template or name == TEMPLATE)
            for name, value in desired.items()
            if value not in (None, {}, [])
        )
    if isinstance(desired, list | tuple):
        found = _paired(live, desired, in_template=in_template)
        return found is not None and all(
            contains(one, other, in_template=in_template) for one, other in zip(found, desired, strict=True)
        )
    return bool(live == desired) or (desired in ("", 0, False) and live is None)


def part_of(live: Any, desired: Any, *, in_template: bool = False) -> Any:
    """Return the fields of `live` that `desired` has, with the values of `live`."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return {
            name: part_of(live[name], value, in_template=in_template or name == TEMPLATE)
            for name, value in desired.items()
            if name in live
        }
    if isinstance(desired, list | tuple) and (found := _paired(live, desired, in_template=in_template)) is not None:
        return [part_of(one, other, in_template=in_template) for one, other in zip(found, desired, strict=True)]
    return live


def difference(live: Any, desired: Any, path: str = "") -> str:
    """Return the path of the first field of `desired` that `live` lacks or has with another value; empty if none."""
    if contains(live, desired, in_template=TEMPLATE in path):
        return ""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        found = (difference(live.get(name), value, f"{path}.{name}") for name, value in desired.items())
        return next(filter(None, found), path)
    if isinstance(desired, list | tuple):
        pairs = _paired(live, desired, in_template=TEMPLATE in path)
        named = (difference(one, other, f"{path}[{n}]") for n, (one, other) in enumerate(zip(pairs or (), desired)))  # noqa: B905
        return next(filter(None, named), path)
    return path


def _paired(live: Any, desired: list[Any] | tuple[Any, ...], *, in_template: bool) -> list[Any] | None:
    """Return the items of `live` for those of `desired`; None if some have none, or another order."""
    if not isinstance(live, list):
        return None
    key = next((key for key in _KEYS if all(isinstance(one, Mapping) and key in one for one in desired)), None)
    if in_template and key is not None:
        places = {one[key]: place for place, one in enumerate(live) if isinstance(one, Mapping) and key in one}
        found = [places.get(one[key], -1) for one in desired]
        return [live[place] for place in found] if -1 not in found and found == sorted(found) else None
    return live if len(live) == len(desired) else None


def has_stamp_of(live: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Whether the last content that was applied is this one."""
    return bool((live["metadata"].get("annotations") or {}).get(APPLIED) == desired["metadata"]["annotations"][APPLIED])


def changed_after(
    live: Mapping[str, Any] | None, wanted: Mapping[str, Any], rewritten: Mapping[str, Any] | None = None
) -> str:
    """Return the path of the first field that changed after the stamped `wanted` was applied, which the API server
    answered with `rewritten`; empty if none did, its owner was taken away, or other content was applied last."""
    if live is None or not has_stamp_of(live, wanted):
        return ""
    answered = wanted if rewritten is None or not has_stamp_of(rewritten, wanted) else rewritten
    path = difference(live, answered).lstrip(".")
    return "" if path.startswith("metadata.ownerReferences") else path


def writer_of(live: Mapping[str, Any], path: str) -> str:
    """Return the field manager, other than this operator, that has the field and wrote last."""
    path = re.sub(r"\[\d+\]$", "", path)
    # Names may have dots, as those of annotations. Controllers write fields of the same name into the status.
    root, names = f"f:{path.partition('.')[0]}", [path.split(".", n)[-1] for n in range(path.count(".") + 1)]
    writers: dict[str, str] = {}
    for one in live["metadata"].get("managedFields") or ():
        owned = json.dumps({name: part for name, part in (one.get("fieldsV1") or {}).items() if name == root})
        manager = str(one.get("manager"))
        if not manager.startswith(FIELD_MANAGER_PREFIX) and any(f'"f:{name}"' in owned for name in names):
            writers[str(one.get("time"))] = manager
    return writers[max(writers)] if writers else "another writer"


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls and empty values, as the apiserver does."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}

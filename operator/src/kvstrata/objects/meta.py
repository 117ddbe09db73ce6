"""Metadata of the operator's objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def metadata(
    name: str,
    namespace: str,
    labels: Mapping[str, str],
    owner: Mapping[str, Any] | None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return metadata; deleting `owner` deletes the object, None is for objects that outlive all others."""
    built: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": dict(labels),
    }
    if owner is not None:
        built["ownerReferences"] = [dict(owner)]
    if annotations:
        built["annotations"] = dict(annotations)
    return built


def without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls and empty values, as the apiserver does."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}

"""The metadata that every object of the operator has."""

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
    """Return metadata with one owner, whose deletion takes the object along; None for what outlives all others."""
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
    """Return the fields that say something: the apiserver drops nulls and empty values, so we do not want them."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}

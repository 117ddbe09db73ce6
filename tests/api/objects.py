"""One valid object of each kind, as a base that tests change."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from kvstrata.api.base import API_VERSION

_SPECS: dict[str, dict[str, Any]] = {
    "CacheDomain": {"staleAfter": "5m"},
    "CacheTier": {"medium": "Redis", "capacity": "1Gi", "encryption": "Disabled", "redis": {"managed": {}}},
    "CachedModel": {
        "model": {"name": "tiny", "source": {"path": "/opt/tiny"}},
        "engine": {"image": "example.com/engine:1", "replicas": 2},
        "tiers": [{"name": "cpu"}],
        "gate": {"authentication": {"apiKeys": {"secretRef": {"name": "keys"}}}},
    },
    "TenantCachePolicy": {
        "tenant": "acme",
        "isolation": "Isolated",
        "budgets": [{"tier": "shared", "guaranteed": "1Gi", "limit": "2Gi", "retention": "12h"}],
    },
    "TenantGroup": {"members": ["acme", "globex"]},
    "PrefixPool": {
        "modelRef": {"name": "tiny"},
        "prefixes": [{"name": "system", "text": "Be brief."}],
        "readers": {"public": True},
    },
    "CacheInvalidation": {"scope": {"tenant": "acme"}, "mode": "Lazy"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One invalid object: the base of `kind` with `changes`, and what the apiserver says of it."""

    id: str
    kind: str
    changes: dict[str, Any]
    field: str
    sentence: str


def valid(kind: str, *, name: str | None = None) -> dict[str, Any]:
    """A fresh valid object of `kind`."""
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name or ("default" if kind == "CacheDomain" else "base"), "namespace": "default"},
        "spec": copy.deepcopy(_SPECS[kind]),
    }


def changed(obj: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`obj` with each path (``spec.budgets[0].limit``) set to a value; the value `REMOVE` removes it."""
    result = copy.deepcopy(obj)
    for path, value in changes.items():
        steps: list[str | int] = []
        for part in path.split("."):
            name, *indices = part.replace("]", "").split("[")
            steps += [name, *map(int, indices)]
        place: Any = result
        for step in steps[:-1]:
            place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
        if value is REMOVE:
            del place[steps[-1]]
        else:
            place[steps[-1]] = value
    return result


OWNED_SECRET = "Secrets whose names begin with kvstrata- or kvs- belong to the operator: name another Secret"
"""The refusal of each field that names a Secret of the operator's."""

REMOVE: Any = object()
"""Marks a field that `changed` takes away."""

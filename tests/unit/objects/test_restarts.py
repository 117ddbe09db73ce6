"""The declared restarts of edits are those of real templates: each field of each object is edited and rendered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvstrata.api import KINDS
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects.children import model_children, redis_tier_children
from kvstrata.objects.pod.identity import cache_identity
from tests.golden.objects.cases import CONTEXT, DOMAIN_ID
from tools.generate.reference import leaves_of_spec
from tools.generate.restarts import RESTARTS, Restart, restart_of

EVERY_FIELD = Path(__file__).parents[2] / "apiserver" / "every_field.yaml"
OBJECTS = [one for one in yaml.safe_load_all(EVERY_FIELD.read_text()) if one["kind"] in ("CacheTier", "CachedModel")]
TIERS = {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == "CacheTier"}
OTHER_VALUES: Mapping[str, Any] = {
    "spec.medium": "NVMe", "spec.engine.kvCacheDtype": "fp8", "spec.model.dtype": "float16",
    "spec.probe.mode": "OnDemand", "spec.cacheServer.chunkSize": 512,
    "spec.redis.external.endpoints": ["other.invalid:6379"], "spec.redis.managed.tls.mode": "Issued",
    "spec.gate.tls.mode": "Issued", "spec.reuse.mode": "Disabled", "spec.redis.managed.rebalance": "Drop",
}  # fmt: skip
"""Values that no rule derives from the present one."""


EXPECTED: Mapping[Restart, Callable[[str], set[str]]] = {
    Restart.NONE: lambda _: set(),
    Restart.PODS: lambda _: {"pods"},
    Restart.PODS_OF_OWN_TIER: lambda medium: set() if medium == "Redis" else {"pods"},
    Restart.PODS_OF_FILES: lambda medium: {"pods"} if medium == "NVMe" else set(),
    Restart.SERVERS: lambda _: {"servers"},
}
"""The templates that change with a field of a tier of this medium."""

NOT_EDITED = {"spec.nvme.emptyDir"}
"""Without contents, so it can only be replaced with another place."""


def test_declared_restarts_are_those_of_real_templates() -> None:
    seen: dict[tuple[str, str, str], set[str]] = {}
    for one in OBJECTS:
        before, medium = rendered(one), one["spec"].get("medium", "")
        assert before is not None
        for path, edited in edits(one):
            after = rendered(edited)
            if after is not None:
                changed = {name for name in before if before[name] != after[name]}
                seen.setdefault((one["kind"], path, medium), set()).update(changed)
    fields = {(kind.INFO.kind, path) for kind in KINDS if kind.INFO.kind in RESTARTS for path in leaves_of_spec(kind)}
    judged = {one: restart_of(*one) for one in fields if restart_of(*one) is not Restart.REFUSED}
    wrong = {
        (kind, path, medium): (changed, judged[kind, path])
        for (kind, path, medium), changed in seen.items()
        if (kind, path) in judged and changed != EXPECTED[judged[kind, path]](medium)
    }
    assert wrong == {}
    assert {path for kind, path in judged if not any((kind, path) == one[:2] for one in seen)} == NOT_EDITED


def test_every_declaration_is_of_a_field_that_exists() -> None:
    for kind in KINDS:
        fields = leaves_of_spec(kind)
        for path in RESTARTS.get(kind.INFO.kind, {}):
            assert any(f"{one}.".startswith(f"{path}.") for one in fields), path


def rendered(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the templates of the models' pods and of the tier's servers, None if the object is refused."""
    try:
        if raw["kind"] == "CacheTier":
            tier = CacheTier.parse(raw)
            model = CachedModel.parse(with_tiers(next(one for one in OBJECTS if one["kind"] == "CachedModel"), tier))
            tiers = (tier,)
        else:
            model = CachedModel.parse(raw)
            tiers = tuple(CacheTier.parse(TIERS[name]) for name in model.tier_names if name in TIERS)
    except (ValidationError, ValueError):
        return None
    identity = cache_identity(model)
    built = model_children(CONTEXT, DOMAIN_ID, model, tiers, identity, shard_count=1)
    servers = redis_tier_children(CONTEXT, tiers[0], restart_token="1") if raw["kind"] == "CacheTier" else ()
    return {
        "pods": [one["spec"]["template"] for one in built if one["kind"] == "Deployment"],
        "servers": {
            one["metadata"]["name"]: one["spec"]["template"] for one in servers if one["kind"] == "StatefulSet"
        },
    }


def with_tiers(raw: Mapping[str, Any], tier: CacheTier) -> dict[str, Any]:
    return {**raw, "spec": {**raw["spec"], "tiers": [{"name": tier.name}]}}


def edits(raw: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field with the object in which it is absent, or has another value."""
    for path, keys in leaves(raw["spec"], "spec", ("spec",)):
        for value in (None, other(path, at(raw, keys))):
            edited = copy.deepcopy(dict(raw))
            parent = at(edited, keys[:-1])
            if value is None:
                del parent[keys[-1]]
            else:
                parent[keys[-1]] = value
            yield path, edited


def leaves(node: Any, path: str, keys: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, child in node.items():
        here = f"{path}.{name}"
        if isinstance(child, dict) and child:
            yield from leaves(child, here, (*keys, name))
        yield here, (*keys, name)


def at(node: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        node = node[key]
    return node


def other(path: str, value: Any) -> Any:
    if path in OTHER_VALUES:
        return OTHER_VALUES[path]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str) and value[:1].isdigit():
        return "2" + value
    return f"{value}x" if isinstance(value, str) else None

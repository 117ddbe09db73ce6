"""The golden cases: API objects in `input.yaml`, everything that is made of them in `output.yaml`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.objects.children import model_children, redis_tier_children
from kvstrata.objects.context import BuildContext
from kvstrata.objects.pod.identity import cache_identity

HERE = Path(__file__).parent
CASES = tuple(sorted(path.parent.name for path in HERE.glob("*/input.yaml")))
CONTEXT = BuildContext(sidecar_image="registry.example/kvstrata-sidecar:1", redis_image="registry.example/redis:7")
DOMAIN_ID = "00112233445566aa"


def read(case: str) -> tuple[CachedModel, tuple[CacheTier, ...]]:
    """Return a case's model and its tiers in the model's order."""
    documents = list(yaml.safe_load_all((HERE / case / "input.yaml").read_text()))
    tiers = {d["metadata"]["name"]: CacheTier.parse(d) for d in documents if d["kind"] == "CacheTier"}
    model = CachedModel.parse(next(d for d in documents if d["kind"] == "CachedModel"))
    return model, tuple(tiers[name] for name in model.tier_names)


def render(case: str) -> list[dict[str, Any]]:
    """Return every object that a case becomes, in the order in which they are applied."""
    model, tiers = read(case)
    identity = cache_identity(model)
    objects = [built for tier in tiers for built in redis_tier_children(CONTEXT, tier, [model.name], restart_token="1")]
    return [
        *objects,
        *model_children(replace(CONTEXT, service_monitors=True), DOMAIN_ID, model, tiers, identity, shard_count=2),
    ]

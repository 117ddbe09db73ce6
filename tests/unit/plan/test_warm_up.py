"""cacheServer.warmup: what it needs, and what pods are told of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.objects.pod.identity import cache_identity
from tests.support.objects import cpu_tier, model, redis_tier
from tests.support.worlds import Simulation

WARMUP = {"warmup": {"bytes": "1Gi", "timeout": "90s"}}


def ready_reason(*tiers: dict[str, Any]) -> str:
    names = tuple(tier["metadata"]["name"] for tier in tiers)
    simulation = Simulation(*tiers, model(tiers=names, cacheServer=WARMUP))
    simulation.come_to_rest()
    status, reason = simulation.condition("CachedModel", "tiny", "Stalled")
    return reason if status == "True" else ""


@pytest.mark.parametrize("tiers", [(), (cpu_tier(),), (redis_tier(),)])
def test_it_needs_memory_to_load_into_and_a_tier_to_load_from(tiers: tuple[dict[str, Any], ...]) -> None:
    assert ready_reason(*tiers) == "WarmupNeedsTiers"


def test_with_both_it_is_carried_out() -> None:
    assert ready_reason(cpu_tier(), redis_tier()) == ""


def test_it_is_no_part_of_what_blocks_mean() -> None:
    plain = CachedModel.parse(model())
    warmed = CachedModel.parse(model(cacheServer=WARMUP))
    assert cache_identity(plain) == cache_identity(warmed)

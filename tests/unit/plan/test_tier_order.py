"""Condition TiersOrdered: a warning about tiers that are no hierarchy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.objects import cpu_tier, model, own, redis_tier
from tests.support.worlds import Simulation


def nvme_tier(capacity: str) -> dict[str, Any]:
    return own("CacheTier", "disk", {"medium": "NVMe", "capacityPerPod": capacity, "nvme": {"emptyDir": {}}})


def of(*tiers: dict[str, Any]) -> Simulation:
    """A model that lists these tiers, at rest."""
    names = tuple(tier["metadata"]["name"] for tier in tiers)
    simulation = Simulation(*tiers, model(tiers=names))
    simulation.come_to_rest()
    return simulation


@pytest.mark.parametrize(
    "tiers",
    [
        (cpu_tier(capacityPerPod="64Mi"), redis_tier()),
        (cpu_tier(), redis_tier(capacity="2Gi")),
        (cpu_tier(), nvme_tier("1Gi"), redis_tier(capacity="4Gi")),
    ],
    ids=["equal", "three media", "disk"],
)
def test_a_hierarchy_is_ordered(tiers: tuple[dict[str, Any], ...]) -> None:
    assert of(*tiers).condition("CachedModel", "tiny", "TiersOrdered") == ("True", "TiersOrdered")


@pytest.mark.parametrize("tiers", [(), (redis_tier(),)], ids=["none", "one"])
def test_less_than_two_tiers_have_no_order(tiers: tuple[dict[str, Any], ...]) -> None:
    assert of(*tiers).condition("CachedModel", "tiny", "TiersOrdered") == ("", "")


@pytest.mark.parametrize(
    ("tiers", "reason", "words"),
    [
        (
            (redis_tier(capacity="4Gi"), cpu_tier()),
            "NotFastToSlow",
            "cpu (CPU) is listed behind shared (Redis)",
        ),
        (
            (redis_tier(capacity="4Gi"), nvme_tier("1Gi")),
            "NotFastToSlow",
            "disk (NVMe) is listed behind shared (Redis), but serves before it",
        ),
        (
            (cpu_tier(), redis_tier()),
            "LowerTierSmaller",
            "shared holds 64Mi and the faster cpu 1Gi in each pod",
        ),
        (
            (cpu_tier(capacityPerPod="2Gi"), nvme_tier("1Gi"), redis_tier(capacity="4Gi")),
            "LowerTierSmaller",
            "disk holds 1Gi in each pod and the faster cpu 2Gi in each pod",
        ),
        (
            (cpu_tier(), nvme_tier("4Gi"), redis_tier(capacity="2Gi")),
            "LowerTierSmaller",
            "shared holds 2Gi and the faster disk 4Gi in each pod",
        ),
    ],
    ids=["memory last", "disk behind shared", "small shared", "small disk", "shared smaller than a disk"],
)
def test_what_is_no_hierarchy_is_told_and_serves_all_the_same(
    tiers: tuple[dict[str, Any], ...], reason: str, words: str
) -> None:
    simulation = of(*tiers)
    assert simulation.condition("CachedModel", "tiny", "TiersOrdered") == ("False", reason)
    conditions = simulation.status("CachedModel", "tiny")["conditions"]
    assert words in next(one["message"] for one in conditions if one["type"] == "TiersOrdered")
    assert simulation.condition("CachedModel", "tiny", "Ready")[1] not in ("NotFastToSlow", "LowerTierSmaller")
    assert simulation.condition("CachedModel", "tiny", "Stalled")[0] != "True"

"""What the benchmark `tier` takes for ready, and what it says of parts that a machine cannot measure."""

from __future__ import annotations

from typing import Any

import pytest

from bench.tier import in_pods, reproduce, scaled
from bench.tier.in_pods import REPLICAS, SHARDS, TIER, _World
from bench.watching import Watch
from e2e.cluster.progress import Progress
from kvstrata.clients.resources import POD
from kvstrata.objects import labels
from tests.tiers.server_kinds import ServerKind

READY = {"type": "Ready", "status": "True"}


def watch_of(*objects: dict[str, Any]) -> Watch:
    found: Any = None
    watch = Watch(found, POD, "demo")
    watch.objects.update({one["metadata"]["name"]: one for one in objects})
    return watch


def pods(count: int = SHARDS * (1 + REPLICAS), **metadata: Any) -> list[dict[str, Any]]:
    names = [f"pod-{number}" for number in range(count)]
    return [
        {"metadata": {"name": name, "labels": {labels.TIER: TIER}, **metadata}, "status": {"conditions": [READY]}}
        for name in names
    ]


def tier(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": TIER}, "status": {"conditions": [READY], **status}}


def test_a_cluster_is_ready_when_its_tier_has_nothing_left_to_do() -> None:
    assert _World(watch_of(tier()), watch_of()).tier_is_ready()
    assert not _World(watch_of(tier(progress="2 of 3 shards ready")), watch_of()).tier_is_ready()
    assert not _World(watch_of(), watch_of()).tier_is_ready()


def test_pods_are_ready_when_all_are_there_and_none_goes() -> None:
    assert _World(watch_of(), watch_of(*pods())).pods_are_ready()
    assert not _World(watch_of(), watch_of(*pods()[1:])).pods_are_ready()
    assert not _World(watch_of(), watch_of(*pods(deletionTimestamp="now"))).pods_are_ready()


def test_figures_of_pods_are_reproduced_on_a_local_cluster_with_the_product() -> None:
    assert reproduce(whole=False, pods=False) == "make bench BENCH=tier"
    assert reproduce(whole=True, pods=True) == "make demo && KVSTRATA_BENCH_WHOLE=1 make bench BENCH=tier"


async def test_without_a_local_cluster_pods_are_named_as_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_pods, "pods_run_here", lambda: False)
    part = await in_pods.measure(Progress())
    assert not part.figures
    assert "make demo" in part.not_measured["pods_"]


async def test_servers_that_are_not_there_are_named_as_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ServerKind("valkey-9.1", installed="not/there")
    monkeypatch.setattr(scaled, "RUNS", (scaled._Run("scaled_valkey", absent, 1),))
    part = await scaled.measure(Progress())
    assert not part.figures
    assert "install_servers" in part.not_measured["scaled_valkey"]

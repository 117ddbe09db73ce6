"""A pool's content from its manifest on: computed, published, replaced, mended, renewed, whatever pods do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.contract.messages.pools import WarmOutcome
from kvstrata.contract.policy.cache_view import reads_of
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.plan.kinds.pool import plan_pool
from tests.support.objects import NAMESPACE, Raw, config_map, cpu_tier, model, pod, policy, pool, redis_tier
from tests.support.renderer import rendered_by
from tests.support.worlds import Simulation

KIND = "PrefixPool"
TEXT = "You are a patient assistant who answers in one sentence."
OTHER = "You are an impatient assistant who answers in one word.."
TINY = model(tiers=("cpu", "shared"))
NEWER = model(tiers=("cpu", "shared"), engine={"image": "engine:2", "replicas": 1})


def prefixes(*texts: str) -> list[Raw]:
    return [{"name": f"p{number}", "text": text} for number, text in enumerate(texts)]


def world(*objects: Raw, tier: Raw | None = None, outcome: WarmOutcome = WarmOutcome.STORED, **spec: Any) -> Simulation:
    """A model with two pods of its newest template, a reader, and a pool on the shared tier."""
    reader = policy("acme", pools=[{"name": "manual"}])
    simulation = Simulation(cpu_tier(), tier or redis_tier(), TINY, reader, *objects)
    simulation.put(*(pod(f"pod-{number}", render_id=rendered_by(TINY)) for number in (0, 1)))
    simulation.renderer.outcome = outcome
    simulation.come_to_rest()
    simulation.put(pool("manual", **{"prefixes": prefixes(TEXT), "tiers": [{"name": "shared"}]} | spec))
    simulation.come_to_rest()
    return simulation


def status(simulation: Simulation) -> dict[str, Any]:
    return simulation.status(KIND, "manual")


def reason(simulation: Simulation, condition: str) -> tuple[str, str]:
    return simulation.condition(KIND, "manual", condition)


def message(simulation: Simulation, condition: str) -> str:
    return str(next(c["message"] for c in status(simulation)["conditions"] if c["type"] == condition))


def read(simulation: Simulation) -> int:
    """How many versions the reader is sent to."""
    return len(reads_of(simulation.bundle()).get(simulation.entry("acme").keyspace, ()))


def unpublish(simulation: Simulation) -> None:
    """Bring a pool back to where all of it is measured and admitted, and readers are not told yet."""
    raw = simulation.kube.objects[(KIND, NAMESPACE, "manual")]
    simulation.put({**raw, "status": {**raw["status"], "published": False}})
    simulation.step(Key(BUNDLE, NAMESPACE, "tiny"))
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)


def delete_tier(simulation: Simulation) -> None:
    """Delete the shared tier, whose servers end first."""
    simulation.delete("CacheTier", "shared")
    simulation.step(Key("CacheTier", NAMESPACE, "shared"))
    assert ("CacheTier", NAMESPACE, "shared") not in simulation.kube.objects


def guaranteed(simulation: Simulation) -> dict[str, int | None]:
    """Return what pods are told to keep for the newest content."""
    return {b.tier: b.guaranteed_bytes for b in simulation.bundle().pools["manual"].versions[0].budgets}


def lose(simulation: Simulation) -> None:
    """Let the tiers lose all chunks, and pods be asked."""
    for chunks in simulation.renderer.stored.values():
        chunks.clear()
    simulation.advance(310)


class TestPublishing:
    def test_it_is_computed_by_one_pod_and_published_when_all_of_it_is_stored(self) -> None:
        simulation = world(prefixes=prefixes(TEXT, OTHER))
        assert reason(simulation, "Ready") == ("True", "Published")
        assert reason(simulation, "Warm") == ("True", "Warm")
        assert {name for name, _ in simulation.renderer.computed} == {"pod-0"}
        assert len(simulation.renderer.computed) == 2
        assert status(simulation)["tiers"] == [{"name": "shared", "stored": 6, "expected": 6, "bytes": 6000}]
        assert read(simulation) == 1
        assert simulation.unsettled() == {}

    def test_nobody_reads_what_is_not_all_there(self) -> None:
        simulation = world(outcome=WarmOutcome.INCOMPLETE)
        assert reason(simulation, "Warm") == ("False", "Warming")
        assert "0 of 3 on CacheTier shared" in message(simulation, "Warm")
        assert reason(simulation, "Published") == ("False", "Warming")
        assert read(simulation) == 0

    def test_published_is_true_when_every_pod_knows_it(self) -> None:
        simulation = world(outcome=WarmOutcome.INCOMPLETE)
        simulation.renderer.outcome = WarmOutcome.STORED
        simulation.advance(60)
        assert reason(simulation, "Published") == ("False", "AwaitingAcks")
        simulation.ack("pod-0")
        simulation.settle()
        assert "pod-1" in message(simulation, "Published")
        simulation.ack("pod-1")
        simulation.settle()
        assert reason(simulation, "Published") == ("True", "Published")

    def test_memory_of_pods_is_filled_in_each_of_them(self) -> None:
        simulation = world(tiers=[{"name": "cpu"}])
        assert reason(simulation, "Warm") == ("True", "Warm")
        assert {name for name, _ in simulation.renderer.computed} == {"pod-0", "pod-1"}

    @pytest.mark.parametrize(
        "elsewhere",
        [
            delete_tier,
            lambda simulation: simulation.edit(KIND, "manual", tiers=[{"name": "cpu"}], pinned=None),
        ],
        ids=["deleted", "edited"],
    )
    def test_what_a_tier_holds_that_it_is_not_to_be_kept_in_any_more_publishes_nothing(
        self, elsewhere: Callable[[Simulation], None]
    ) -> None:
        simulation = world(pinned=True, tiers=None)
        assert status(simulation)["tiers"] == [{"name": "shared", "stored": 3, "expected": 3, "bytes": 3000}]
        unpublish(simulation)
        plan = plan_pool(simulation.store.world(NAMESPACE), "manual", simulation.now)
        assert any(write.status.get("published") for write in plan.statuses)
        elsewhere(simulation)
        plan = plan_pool(simulation.store.world(NAMESPACE), "manual", simulation.now)
        assert not any(write.status.get("published") for write in plan.statuses)
        simulation.come_to_rest()
        simulation.advance(20)
        simulation.come_to_rest()
        assert [tier["name"] for tier in status(simulation)["tiers"]] == ["cpu"]
        assert read(simulation) == 1

    def test_an_encrypted_tier_waits_for_the_key(self) -> None:
        simulation = world(tier=redis_tier(encryption="Required"))
        assert reason(simulation, "Ready") == ("True", "Published")
        (version,) = simulation.bundle().pools["manual"].versions
        assert len(version.keys) == 1

    def test_a_pool_at_rest_writes_nothing_and_neither_does_a_restart(self) -> None:
        simulation = world()
        written, told = simulation.kube.writes, status(simulation)
        simulation.advance(7200)
        assert (simulation.kube.writes, status(simulation)) == (written, told)
        simulation.restart()
        simulation.advance(30)
        assert (simulation.kube.writes, status(simulation)) == (written, told)


class TestFailures:
    def test_a_pod_that_fails_is_not_the_only_one_that_tries(self) -> None:
        simulation = world(outcome=WarmOutcome.ENGINE)
        simulation.advance(120)
        assert {name for name, _ in simulation.renderer.computed} == {"pod-0", "pod-1"}

    def test_it_is_tried_less_and_less_often_and_says_so_when_its_time_is_over(self) -> None:
        simulation = world(outcome=WarmOutcome.ENGINE, warmup={"timeout": "1m"})
        simulation.advance(7200)
        simulation.come_to_rest()
        assert reason(simulation, "Reconciling") == ("True", "WarmingTimedOut")
        assert len(simulation.renderer.computed) < 50
        simulation.renderer.outcome = WarmOutcome.STORED
        simulation.advance(700)
        simulation.come_to_rest()
        assert reason(simulation, "Ready") == ("True", "Published")

    @pytest.mark.parametrize(
        ("outcome", "expected"), [(WarmOutcome.MISMATCH, "RenderMismatch"), (WarmOutcome.DISAGREE, "ReplicasDisagree")]
    )
    def test_what_no_attempt_mends_is_said_and_not_tried_again(self, outcome: WarmOutcome, expected: str) -> None:
        simulation = world()
        (before,) = simulation.bundle().pools["manual"].versions
        simulation.renderer.outcome = outcome
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.come_to_rest()
        assert reason(simulation, "Stalled") == ("True", expected)
        assert "p0" in message(simulation, "Stalled")
        done = len(simulation.renderer.computed)
        simulation.advance(3600)
        assert len(simulation.renderer.computed) == done
        assert simulation.bundle().pools["manual"].versions[0] == before
        assert read(simulation) == 1

    def test_chunks_that_are_lost_are_computed_again_and_readers_stay(self) -> None:
        simulation = world()
        simulation.renderer.outcome = WarmOutcome.ENGINE
        lose(simulation)
        simulation.come_to_rest()
        assert reason(simulation, "Warm") == ("False", "ChunksLost")
        assert reason(simulation, "Published") == ("True", "Published")
        simulation.renderer.outcome = WarmOutcome.STORED
        simulation.advance(900)
        simulation.come_to_rest()
        assert reason(simulation, "Warm") == ("True", "Warm")

    def test_only_prefixes_that_lost_something_are_computed_again(self) -> None:
        simulation = world(prefixes=prefixes(TEXT, OTHER))
        chunks = next(iter(simulation.renderer.stored.values()))
        made = simulation.renderer.computed[:]
        simulation.renderer.computed.clear()
        report = simulation.world.renders[simulation.pod("pod-0").uid][made[1][1]].answer
        assert report is not None
        chunks.discard(report.hashes[-32:])
        simulation.advance(360)
        assert simulation.renderer.computed == [made[1]]

    def test_what_is_lost_while_its_source_is_gone_cannot_be_computed_again(self) -> None:
        named = [{"name": "p0", "configMapKeyRef": {"name": "sources", "key": "text"}}]
        simulation = world(config_map("sources", text=TEXT), prefixes=named)
        assert reason(simulation, "Ready") == ("True", "Published")
        simulation.delete("ConfigMap", "sources")
        lose(simulation)
        assert reason(simulation, "Stalled") == ("True", "SourceNotFound")
        assert read(simulation) == 1


class TestReplacing:
    def test_readers_keep_the_old_until_the_new_is_warm_and_every_pod_knows_it(self) -> None:
        simulation = world()
        (old,) = simulation.bundle().pools["manual"].versions
        simulation.renderer.outcome = WarmOutcome.INCOMPLETE
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.come_to_rest()
        assert [version.published for version in simulation.bundle().pools["manual"].versions] == [True, False]
        assert reason(simulation, "Published") == ("True", "Published")
        simulation.renderer.outcome = WarmOutcome.STORED
        simulation.advance(60)
        new, kept = simulation.bundle().pools["manual"].versions
        assert (kept, new.published) == (old, True)
        simulation.advance(60)
        assert len(simulation.bundle().pools["manual"].versions) == 2, "no pod has said that it knows the new one"
        for name in ("pod-0", "pod-1"):
            simulation.ack(name)
        for _ in range(2):
            simulation.step(Key(KIND, NAMESPACE, "manual"))
        assert "next" not in status(simulation)
        assert reason(simulation, "Published") == ("False", "NotCommitted"), "pods still read the old one"
        simulation.come_to_rest()
        assert simulation.bundle().pools["manual"].versions == (new,)
        assert "next" not in status(simulation)
        assert status(simulation)["scope"]["rolls"] == 1
        assert reason(simulation, "Ready") == ("True", "Published")
        assert simulation.unsettled() == {}

    def test_the_old_stays_for_pods_that_make_its_tokens(self) -> None:
        simulation = world()
        simulation.renderer.overrides = {"pod-2": {"seasoning": b"newer"}}
        simulation.edit("CachedModel", "tiny", engine=NEWER["spec"]["engine"])
        simulation.put(pod("pod-2", render_id=rendered_by(NEWER)))
        for _ in range(2):
            simulation.advance(60)
            simulation.come_to_rest()
        assert read(simulation) == 2
        assert status(simulation)["next"]["published"] is True
        for name in ("pod-0", "pod-1"):
            simulation.delete("Pod", name)
        simulation.come_to_rest()
        assert read(simulation) == 1
        assert "next" not in status(simulation)

    def test_what_is_cut_off_is_not_read_while_the_new_is_computed(self) -> None:
        simulation = world(invalidation="Eager")
        simulation.renderer.outcome = WarmOutcome.INCOMPLETE
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.come_to_rest()
        assert read(simulation) == 0
        simulation.renderer.outcome = WarmOutcome.STORED
        simulation.advance(60)
        simulation.come_to_rest()
        assert read(simulation) == 1

    def test_an_invalidation_empties_a_pool_and_it_is_computed_anew(self) -> None:
        simulation = world()
        (old,) = simulation.bundle().pools["manual"].versions
        raw = {"apiVersion": "kvstrata.io/v1alpha1", "kind": "CacheInvalidation"}
        spec = {"mode": "Lazy", "scope": {"pool": "manual"}}
        simulation.put({**raw, "metadata": {"name": "now", "namespace": NAMESPACE}, "spec": spec})
        simulation.come_to_rest()
        (new,) = simulation.bundle().pools["manual"].versions
        assert new.keyspace != old.keyspace
        assert new.manifest == old.manifest
        assert reason(simulation, "Ready") == ("True", "Published")

    def test_a_pool_is_computed_anew_before_its_retention_ends(self) -> None:
        simulation = world(tier=redis_tier(maxRetention="1h"))
        (old,) = simulation.bundle().pools["manual"].versions
        simulation.advance(2600)
        simulation.come_to_rest()
        assert simulation.bundle().pools["manual"].versions == (old,)
        simulation.advance(200)
        simulation.come_to_rest()
        (new,) = simulation.bundle().pools["manual"].versions
        assert new.keyspace != old.keyspace
        assert (new.manifest, new.published) == (old.manifest, True)
        assert status(simulation)["contentDigest"]
        assert simulation.unsettled() == {}


class TestPinned:
    def test_what_is_pinned_is_guaranteed(self) -> None:
        simulation = world(pinned=True)
        (version,) = simulation.bundle().pools["manual"].versions
        assert {b.tier: b.guaranteed_bytes for b in version.budgets} == {"cpu": None, "shared": 3000}
        lose(simulation)
        simulation.come_to_rest()
        assert {b.guaranteed_bytes for b in simulation.bundle().pools["manual"].versions[0].budgets} == {None, 3000}

    def test_what_cannot_be_guaranteed_is_published_without_a_guarantee_until_there_is_room(self) -> None:
        greedy = policy("greedy", budgets=[{"tier": "shared", "guaranteed": "50Mi"}])
        simulation = world(greedy, tier=redis_tier(capacity="64000Ki"), pinned=True)
        room = 64000 * 1024 * 80 // 100
        assert room - 50 * 2**20 < 3000
        assert reason(simulation, "Admitted") == ("False", "InsufficientCapacity")
        assert "TenantCachePolicy greedy 50Mi" in message(simulation, "Admitted")
        assert reason(simulation, "Published") == ("True", "Published")
        assert reason(simulation, "Ready") == ("False", "InsufficientCapacity")
        assert read(simulation) == 1
        assert guaranteed(simulation) == {"cpu": None, "shared": None}
        assert simulation.unsettled() == {}
        simulation.edit("TenantCachePolicy", "greedy", budgets=None)
        simulation.come_to_rest()
        simulation.advance(310)
        simulation.come_to_rest()
        assert read(simulation) == 1

"""Redis tiers: budgets by pods' word, several of them in order, clusters, and the order in which blocks go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.policy.tiers import AllowedServers, Server, TierAccess, TierRules
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.objects.quantities import MIB
from tests.support.objects import (
    NAMESPACE,
    STALLED_REDIS,
    cpu_tier,
    domain,
    group,
    model,
    older_tier,
    pod,
    policy,
    redis_tier,
)
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
CLOSED = TierState("shared", "Redis", "closed", capacity_bytes=64 * MIB * 80 // 100)
OLD = TierState("shared", "Redis", "closed")


def external(*endpoints: str, **more: Any) -> Mapping[str, Any]:
    return {"external": {"endpoints": list(endpoints), **more}}


def at_rest(*objects: Any, said: tuple[TierState, ...] = (CLOSED,)) -> Simulation:
    """A model on memory and Redis of 64Mi, one pod, and what it says."""
    base = [redis_tier(), cpu_tier(), model(tiers=("cpu", "shared"))]
    given = {(raw["kind"], raw["metadata"]["name"]) for raw in objects}
    base = [raw for raw in base if (raw["kind"], raw["metadata"]["name"]) not in given]
    simulation = Simulation(*base, pod("pod-0"), *objects)
    simulation.come_to_rest()
    simulation.ack("pod-0", tiers=said)
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def within(simulation: Simulation, kind: str = TCP, name: str = "acme") -> tuple[str, str]:
    return simulation.condition(kind, name, "WithinBudget")


def template(simulation: Simulation) -> dict[str, Any]:
    """The template of the model's pods."""
    found: dict[str, Any] = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]["spec"]["template"]
    return found


def rules(simulation: Simulation) -> tuple[TierRules, ...]:
    """The rules of the model's tiers in its bundle."""
    return simulation.world.bundles["tiny"].bundle.root.tiers


def access(simulation: Simulation) -> Mapping[str, TierAccess]:
    return simulation.world.bundles["tiny"].bundle.root.access


def admitted(simulation: Simulation) -> list[str]:
    """The models whose pods the tier's NetworkPolicy admits."""
    policy = simulation.kube.objects[("NetworkPolicy", NAMESPACE, names.redis("shared"))]
    peers = [peer["podSelector"].get("matchExpressions", []) for peer in policy["spec"]["ingress"][0]["from"]]
    return [model for (one,) in filter(None, peers) for model in one["values"]]


class TestBudgets:
    @pytest.mark.parametrize("budget", [{"limit": "1Mi"}, {"guaranteed": "1Mi"}, {"retention": "1h"}])
    def test_are_kept_when_every_pod_says_that_it_divides_the_capacity(self, budget: dict[str, str]) -> None:
        simulation = at_rest(policy("acme", budgets=[{"tier": "shared", **budget}]))
        assert within(simulation) == ("True", "BudgetsEnforced")
        for said, expected in ((OLD, ("Unknown", "BudgetsNotEnforced")), (CLOSED, ("True", "BudgetsEnforced"))):
            simulation.ack("pod-0", tiers=(said,))
            simulation.settle()
            assert within(simulation) == expected

    def test_hold_while_the_server_is_away_because_nothing_is_stored_then(self) -> None:
        simulation = at_rest(
            policy("acme", budgets=[{"tier": "shared", "limit": "1Mi"}]), said=(replace(CLOSED, breaker="open"),)
        )
        assert within(simulation) == ("True", "BudgetsEnforced")

    def test_of_groups_and_the_public_scope_say_the_same(self) -> None:
        budget = [{"tier": "shared", "limit": "1Mi"}]
        simulation = at_rest(domain(publicBudgets=budget), group("lab", "a", budgets=budget))
        assert within(simulation, "TenantGroup", "lab") == ("True", "BudgetsEnforced")
        assert within(simulation, "CacheDomain", "default") == ("True", "BudgetsEnforced")

    def test_need_the_word_of_memory_and_of_redis_where_both_have_one(self) -> None:
        memory = TierState("cpu", "CPU", "closed")
        both = [{"tier": "cpu", "limit": "1Mi"}, {"tier": "shared", "limit": "1Mi"}]
        simulation = at_rest(policy("acme", budgets=both))
        assert within(simulation) == ("Unknown", "MemoryNotGoverned")
        simulation.ack("pod-0", tiers=(memory, OLD))
        simulation.settle()
        assert within(simulation) == ("Unknown", "BudgetsNotEnforced")
        simulation.ack("pod-0", tiers=(memory, CLOSED))
        simulation.settle()
        assert within(simulation) == ("True", "BudgetsEnforced")

    def test_a_guarantee_above_what_blocks_may_take_is_refused(self) -> None:
        simulation = at_rest(policy("acme", budgets=[{"tier": "shared", "guaranteed": "52Mi"}]))
        assert simulation.condition(TCP, "acme", "Stalled") == ("True", "GuaranteeExceedsCapacity")
        simulation.edit(TCP, "acme", budgets=[{"tier": "shared", "guaranteed": "51Mi"}])
        simulation.come_to_rest()
        assert simulation.condition("CacheTier", "shared", "CapacityCommitted") == ("True", "GuaranteesFit")
        assert simulation.status("CacheTier", "shared")["guaranteed"] == "51Mi"

    def test_guarantees_of_a_scope_count_once_however_many_models_share_the_tier(self) -> None:
        simulation = at_rest(
            model("other", tiers=("shared",)),
            policy("both", budgets=[{"tier": "shared", "guaranteed": "20Mi"}]),
            policy("one", budgets=[{"tier": "shared", "guaranteed": "20Mi"}], models={"names": ["tiny"]}),
        )
        assert simulation.status("CacheTier", "shared")["guaranteed"] == "40Mi"

    def test_a_guarantee_that_does_not_fit_beside_an_older_one_is_told_on_the_tier_and_kept_by_nobody(self) -> None:
        simulation = at_rest(
            policy("acme", budgets=[{"tier": "shared", "guaranteed": "30Mi"}]),
            policy("globex", budgets=[{"tier": "shared", "guaranteed": "30Mi"}]),
            policy("modest", budgets=[{"tier": "shared", "limit": "30Mi"}]),
        )
        assert simulation.condition("CacheTier", "shared", "CapacityCommitted") == ("False", "GuaranteesWaiting")
        assert simulation.status("CacheTier", "shared")["guaranteed"] == "30Mi"
        for name in ("acme", "globex", "modest"):
            assert within(simulation, name=name) == ("True", "BudgetsEnforced")
        simulation.delete(TCP, "globex")
        simulation.come_to_rest()
        simulation.ack("pod-0", tiers=(CLOSED,))
        simulation.come_to_rest()
        assert within(simulation) == ("True", "BudgetsEnforced")


class TestEdits:
    @pytest.mark.parametrize(
        ("edit", "expected"),
        [
            ({"capacity": "96Mi"}, (96 * MIB * 80 // 100, None)),
            ({"eviction": {"highWatermarkPercent": 50}}, (32 * MIB, None)),
            ({"maxRetention": "1h"}, (64 * MIB * 80 // 100, 3600)),
        ],
    )
    def test_reach_pods_without_a_restart_and_count_once_acknowledged(
        self, edit: dict[str, Any], expected: tuple[int, int | None]
    ) -> None:
        simulation = at_rest()
        before = template(simulation)
        simulation.edit("CacheTier", "shared", **edit)
        simulation.settle()
        (tier,) = rules(simulation)
        assert (tier.capacity_bytes, tier.retention_s) == expected
        assert simulation.condition("CachedModel", "tiny", "PolicyEnforced") == ("False", "AwaitingAcks")
        if "maxRetention" not in edit:
            assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == ("Unknown", "BudgetsNotEnforced")
        simulation.ack("pod-0", tiers=(replace(CLOSED, capacity_bytes=tier.capacity_bytes),))
        simulation.settle()
        assert simulation.condition("CachedModel", "tiny", "PolicyEnforced") == ("True", "AllPodsAcknowledged")
        assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == ("True", "EvictsOwnBlocks")
        assert template(simulation) == before

    def test_a_tier_that_comes_or_goes_changes_no_pod_and_counts_once_acknowledged(self) -> None:
        far = redis_tier("far", redis=external("far:6379"))
        simulation = at_rest(far)
        before = template(simulation)
        for tiers in (("cpu", "shared", "far"), ("cpu", "far"), ("cpu",)):
            simulation.edit("CachedModel", "tiny", tiers=[{"name": name} for name in tiers])
            simulation.settle()
            assert tuple(tier.name for tier in rules(simulation)) == tiers[1:]
            assert simulation.condition("CachedModel", "tiny", "PolicyEnforced") == ("False", "AwaitingAcks")
            simulation.ack("pod-0", tiers=tuple(replace(CLOSED, name=name) for name in tiers[1:]))
            simulation.settle()
            assert simulation.condition("CachedModel", "tiny", "PolicyEnforced") == ("True", "AllPodsAcknowledged")
            assert template(simulation) == before

    def test_a_tiers_servers_admit_the_pods_of_the_models_that_list_it(self) -> None:
        simulation = at_rest(model("other", tiers=("shared",)))
        assert admitted(simulation) == ["other", "tiny"]
        simulation.edit("CachedModel", "tiny", tiers=[{"name": "cpu"}])
        simulation.come_to_rest()
        assert admitted(simulation) == ["other"]
        simulation.delete("CachedModel", "other")
        simulation.come_to_rest()
        assert admitted(simulation) == []


class TestAccess:
    """What pods log in with: the operator copies it into the bundle."""

    LOGIN = ("login", "password")

    def test_reaches_the_bundle_when_it_was_read_and_whenever_it_changes(self) -> None:
        simulation = at_rest(redis_tier(redis=external("r:6379", authSecretRef={"name": "login"})))
        assert access(simulation) == {}
        for password in (b"first", b"second"):
            simulation.queue.add_all(simulation.store.take_access(NAMESPACE, "shared", {self.LOGIN: password}))
            simulation.settle()
            assert access(simulation) == {"shared": TierAccess(password)}
        assert simulation.store.take_access(NAMESPACE, "shared", {self.LOGIN: b"second"}) == frozenset()

    def test_stays_in_the_bundle_while_a_new_leader_has_not_read_it(self) -> None:
        simulation = at_rest(redis_tier(redis=external("r:6379", authSecretRef={"name": "login"})))
        simulation.queue.add_all(simulation.store.take_access(NAMESPACE, "shared", {self.LOGIN: b"first"}))
        simulation.settle()
        revision = simulation.world.bundles["tiny"].bundle.root.revision
        simulation.restart()
        simulation.come_to_rest()
        root = simulation.world.bundles["tiny"].bundle.root
        assert (root.access, root.revision) == ({"shared": TierAccess(b"first")}, revision)

    def test_goes_with_the_tier(self) -> None:
        simulation = at_rest(redis_tier(redis=external("r:6379", authSecretRef={"name": "login"})))
        simulation.queue.add_all(simulation.store.take_access(NAMESPACE, "shared", {self.LOGIN: b"first"}))
        simulation.settle()
        simulation.edit("CachedModel", "tiny", tiers=[{"name": "cpu"}])
        simulation.come_to_rest()
        assert access(simulation) == {}


class TestMakingRoom:
    def test_a_tier_says_so_when_every_pod_does(self) -> None:
        simulation = at_rest()
        assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == ("True", "EvictsOwnBlocks")
        simulation.ack("pod-0", tiers=(OLD,))
        simulation.settle()
        assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == ("Unknown", "BudgetsNotEnforced")
        simulation.delete("Pod", "pod-0")
        simulation.come_to_rest()
        simulation.advance(20)
        assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == ("", "")

    def test_a_server_that_may_hold_less_is_full_before(self) -> None:
        simulation = at_rest(redis_tier(redis=external("one:6379")))
        backends = simulation.store.domain(NAMESPACE).backends
        for max_bytes, expected in ((MIB, ("False", "ServerTooSmall")), (64 * MIB, ("True", "EvictsOwnBlocks"))):
            backends["shared"] = replace(backends["shared"], max_bytes=max_bytes)
            simulation.queue.add(Key("CacheTier", NAMESPACE, "shared"))
            simulation.settle()
            assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == expected

    @pytest.mark.parametrize(
        ("percent", "cluster", "expected"), [(None, False, 80), (80, False, 80), (50, False, 50), (None, True, 65)]
    )
    def test_pods_are_told_what_blocks_may_take(self, percent: int | None, cluster: bool, expected: int) -> None:
        servers = external("one:6379", cluster=cluster)
        simulation = at_rest(redis_tier(capacity="100Mi", redis=servers, eviction={"highWatermarkPercent": percent}))
        (tier,) = rules(simulation)
        assert tier.capacity_bytes == 100 * MIB * expected // 100


class TestSeveral:
    TIERS = (
        redis_tier("near", capacity="32Mi", maxRetention="1h"),
        redis_tier("far", redis=external("far:6379"), encryption="Required"),
        cpu_tier(),
    )

    def test_are_rendered_from_fast_to_slow_each_with_its_own_parameters(self) -> None:
        simulation = at_rest(*self.TIERS, model(tiers=("cpu", "near", "far")))
        near = TierRules(
            "near", (Server("kvs-near-redis.team.svc", 6379),), 32 * MIB * 80 // 100, 3600,
            cluster=True, username="data", password=True, tls=True,
        )  # fmt: skip
        far = TierRules("far", (Server("far", 6379),), 64 * MIB * 80 // 100, encrypts=True)
        assert rules(simulation) == (near, far)
        simulation.edit("CachedModel", "tiny", tiers=[{"name": "cpu"}, {"name": "far"}, {"name": "near"}])
        simulation.come_to_rest()
        assert rules(simulation) == (far, near)

    def test_pods_get_the_limits_of_the_installation_for_servers_that_it_does_not_run(self) -> None:
        simulation = at_rest(*self.TIERS, model(tiers=("cpu", "near", "far")))
        limits = simulation.store.allowed_servers = AllowedServers(("*.cache.example",))
        simulation.edit("CachedModel", "tiny", tiers=[{"name": "cpu"}, {"name": "far"}, {"name": "near"}])
        simulation.come_to_rest()
        assert [(tier.name, tier.allowed) for tier in rules(simulation)] == [("far", limits), ("near", None)]

    def test_have_budgets_and_conditions_of_their_own(self) -> None:
        budgets = [
            {"tier": "far", "guaranteed": "2Mi"},
            {"tier": "near", "limit": "1Mi", "retention": "10m"},
        ]
        said = tuple(TierState(name, "Redis", "closed", capacity_bytes=1) for name in ("near", "far"))
        simulation = at_rest(
            *self.TIERS, model(tiers=("cpu", "near", "far")), policy("acme", budgets=budgets), said=said
        )
        told = {b.tier: (b.limit_bytes, b.guaranteed_bytes, b.retention_s) for b in simulation.entry("acme").budgets}
        assert told == {"far": (None, 2 * MIB, None), "near": (MIB, None, 600)}
        assert within(simulation) == ("True", "BudgetsEnforced")
        assert simulation.status("CacheTier", "far")["guaranteed"] == "2Mi"
        assert simulation.status("CacheTier", "near")["guaranteed"] == "0"
        simulation.ack("pod-0", tiers=(replace(said[0], breaker="open"), said[1]))
        simulation.advance(20)
        assert simulation.condition("CacheTier", "near", "Ready")[0] == "False"
        assert simulation.condition("CacheTier", "far", "Ready")[0] == "True"

    def test_one_that_is_not_ready_or_stalled_does_not_hold_up_the_others(self) -> None:
        simulation = at_rest(older_tier(), *self.TIERS, model(tiers=("cpu", "near", "far")), said=())
        simulation.backends_up = False
        simulation.advance(20)
        assert simulation.condition("CacheTier", "far", "Ready")[0] == "False"
        assert [tier.name for tier in rules(simulation)] == ["near", "far"]
        assert simulation.condition("CachedModel", "tiny", "Ready")[0] == "True"
        assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("False", "TierNotReady")
        simulation.edit("CacheTier", "near", redis=STALLED_REDIS)
        simulation.come_to_rest()
        assert [tier.name for tier in rules(simulation)] == ["far"]
        assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("False", "TierStalled")


class TestTwoOnOneServer:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (external("r:6379"), external("r:6379")),
            (external("a:6379", "r:6379", cluster=True), external("R:6379", "b:6379", cluster=True)),
            (external("redis:6379"), external(f"redis.{NAMESPACE}.svc:6379")),
            (external(f"redis.{NAMESPACE}:6379"), external(f"redis.{NAMESPACE}.svc.cluster.local:6379")),
            ({"managed": {}}, external(f"{names.redis('one')}:6379")),
            ({"managed": {}}, external(f"{names.redis('one')}.{NAMESPACE}.svc.example.org:6379")),
            ({"managed": {}}, external(f"{names.redis('one')}-0-0.{names.redis('one')}.{NAMESPACE}.svc:6379")),
            (external("10.0.0.1:6379"), external("10.0.0.1:6379")),
            (external("[2001:DB8::1]:6379"), external("[2001:db8::1]:6379")),
        ],
    )
    def test_the_younger_is_stalled_whichever_models_list_them(
        self, one: Mapping[str, Any], other: Mapping[str, Any]
    ) -> None:
        simulation = Simulation(
            aged(redis_tier("one", redis=one), 1),
            aged(redis_tier("aaa", redis=other), 2),
            model(tiers=("one",)),
            model("small", tiers=("aaa",)),
        )
        simulation.come_to_rest()
        assert simulation.condition("CacheTier", "one", "Stalled")[0] != "True"
        assert simulation.condition("CacheTier", "aaa", "Stalled") == ("True", "TiersConflict")
        assert simulation.condition("CachedModel", "small", "TiersBound") == ("False", "TierStalled")

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (external("r:6379"), external("r:6380")),
            (external("r:6379"), external("r.elsewhere.svc:6379")),
            (external("redis-0.redis.ns.svc:6379"), external("redis-1.redis.ns.svc:6379")),
            ({"managed": {}}, {"managed": {}}),
            (external("10.0.0.1:6379"), external("10.0.0.2:6379")),
        ],
    )
    def test_others_are_not(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        simulation = Simulation(redis_tier("one", redis=one), redis_tier("other", redis=other))
        simulation.come_to_rest()
        for name in ("one", "other"):
            assert simulation.condition("CacheTier", name, "Stalled")[0] != "True"

    def test_it_is_used_when_the_elder_goes_elsewhere(self) -> None:
        simulation = Simulation(
            aged(redis_tier("one", redis=external("r:6379")), 1),
            aged(redis_tier("other", redis=external("r:6379")), 2),
            model(tiers=("other",)),
            pod("pod-0"),
        )
        simulation.come_to_rest()
        assert rules(simulation) == ()
        simulation.edit("CacheTier", "one", redis=external("s:6379"))
        simulation.come_to_rest()
        assert simulation.condition("CacheTier", "other", "Stalled")[0] != "True"
        assert [tier.name for tier in rules(simulation)] == ["other"]


def aged(tier: dict[str, Any], second: int) -> dict[str, Any]:
    """A tier that was created at this second."""
    return {**tier, "metadata": {**tier["metadata"], "creationTimestamp": f"2026-01-01T00:00:{second:02d}Z"}}


class TestClusters:
    TIER = redis_tier(redis=external("a:6379", "b:6379", cluster=True))

    def test_are_used_with_all_their_addresses(self) -> None:
        simulation = at_rest(self.TIER)
        assert simulation.condition("CacheTier", "shared", "Stalled")[0] != "True"
        (tier,) = rules(simulation)
        assert (tier.cluster, tier.servers) == (True, (Server("a", 6379), Server("b", 6379)))

    def test_count_their_servers_as_pods_see_them(self) -> None:
        simulation = at_rest(self.TIER, said=(replace(CLOSED, nodes=3, nodes_away=1),))
        status = simulation.status("CacheTier", "shared")
        assert (status["shards"], status["shardsReady"]) == (3, 2)
        assert status["used"] == "0"

    @pytest.mark.parametrize(("nodes", "away"), [(10**9, 0), (3, -(10**9)), (-5, -5), (2, 10**9)])
    def test_a_pod_that_tells_nonsense_leaves_the_status_one_that_can_be_written(self, nodes: int, away: int) -> None:
        simulation = at_rest(self.TIER, said=(replace(CLOSED, nodes=nodes, nodes_away=away),))
        status = simulation.status("CacheTier", "shared")
        assert 0 <= status["shardsReady"] <= status["shards"] <= 1024

    def test_are_asked_at_another_address_when_one_is_away(self) -> None:
        simulation = at_rest(self.TIER)
        simulation.backends_up = False
        simulation.advance(20)
        simulation.backends_up, simulation.asked[:] = True, []
        simulation.advance(10)
        assert simulation.condition("CacheTier", "shared", "Ready")[0] == "True"
        assert set(simulation.asked) <= {"a:6379", "b:6379"}
        settled = simulation.asked[-1]
        simulation.advance(60)
        assert simulation.asked[-1] == settled

    def test_whose_servers_are_all_away_are_asked_in_turn_and_written_about_once(self) -> None:
        simulation = at_rest(self.TIER)
        simulation.backends_up = False
        simulation.advance(20)
        told = simulation.kube.objects[("CacheTier", NAMESPACE, "shared")]
        for _ in range(2):
            simulation.asked.clear()
            simulation.advance(60)
            assert set(simulation.asked) == {"a:6379", "b:6379"}
            assert simulation.kube.objects[("CacheTier", NAMESPACE, "shared")] == told
            simulation.restart()

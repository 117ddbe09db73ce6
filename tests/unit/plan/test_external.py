"""External servers are checked before pods depend on them; each check that fails has a reason, and consequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.api.cachetier import CacheTier
from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.policy.tiers import Server
from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.model.pods import BackendAccess, BackendReport
from kvstrata.model.redis.external import ExternalReport, ServerFacts
from kvstrata.objects.quantities import MIB
from kvstrata.plan.redis import external
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, redis_tier
from tests.support.worlds import START, Simulation

DOMAIN = "0123456789abcdef"
WELL = ServerFacts(
    "a:6379", True, "", "", version="7.0.15", in_cluster_mode=False, max_bytes=64 * MIB, eviction="noeviction"
)
IN_CLUSTER = replace(WELL, in_cluster_mode=True, slots=8192)
AWAY = ServerFacts("b:6379", False, "Timeout", "b:6379 did not answer in time")


def declared(*endpoints: str, **more: Any) -> Mapping[str, Any]:
    return {"external": {"endpoints": list(endpoints), **more}}


def tier(*, cluster: bool = False) -> CacheTier:
    more = {"cluster": True} if cluster else {}
    return CacheTier.model_validate(redis_tier(redis=declared("a:6379", **more)))


def report(*servers: ServerFacts, mapped: bool = False) -> BackendReport:
    access, reachable = BackendAccess("a:6379", "a"), any(one.reachable for one in servers)
    return BackendReport(access, reachable, "", "", START, external=ExternalReport(servers, mapped))


def clustered(*servers: ServerFacts) -> BackendReport:
    named = (replace(one, address=f"{letter}:6379") for letter, one in zip("abcdef", servers, strict=False))
    return report(*named, mapped=True)


class TestOneServer:
    @pytest.mark.parametrize(
        ("facts", "reason", "words"),
        [
            ({"in_cluster_mode": True}, "ClusterModeMismatch", "is in cluster mode"),
            ({"is_replica": True}, "ReadOnlyReplica", "name its primary"),
            ({"version": "6.2.14"}, "TooOld", "6.2.14"),
            ({"version": "6.2.14", "refused": ("evalsha",)}, "TooOld", "7.0"),
            ({"refused": ("evalsha", "info")}, "MissingPermissions", "may not run evalsha, info"),
            ({"keys_refused": ("get",)}, "MissingPermissions", f"get on keys ~{domain_pattern(DOMAIN)}"),
            ({"unknown": ("eval",)}, "MissingPermissions", "has no command eval"),
            ({"max_bytes": 51 * MIB}, "ServerTooSmall", "51Mi"),
        ],
    )
    def test_that_pods_cannot_depend_on_is_not_used_and_the_reason_says_what_to_change(
        self, facts: dict[str, Any], reason: str, words: str
    ) -> None:
        said = report(replace(WELL, **facts))
        decision = external.missing(tier(), said, DOMAIN)
        assert decision is not None
        assert (decision.reason, words in decision.message) == (reason, True), decision
        assert external.servers_to_use(tier(), said, DOMAIN) is None
        (suitable,) = external.suitability(tier(), said, None, DOMAIN)
        assert (suitable.status, suitable.reason) == ("False", reason)

    @pytest.mark.parametrize(
        ("facts", "reason"),
        [({"eviction": "allkeys-lru"}, "NotNoeviction"), ({"max_bytes": 0}, "MemoryUnbounded")],
    )
    def test_that_is_only_warned_of_is_used(self, facts: dict[str, Any], reason: str) -> None:
        said = report(replace(WELL, **facts))
        assert external.missing(tier(), said, DOMAIN) is None
        warned = external.warning(tier(), said, DOMAIN)
        assert warned is not None
        assert warned.reason == reason
        assert external.servers_to_use(tier(), said, DOMAIN) is not None
        assert [(one.status, one.reason) for one in external.suitability(tier(), said, None, DOMAIN)] == [
            ("False", reason)
        ]

    @pytest.mark.parametrize("facts", [{}, {"version": "10.0.1"}, {"version": "8.1.0", "software": "Valkey"}])
    def test_that_passes_every_check_is_suitable(self, facts: dict[str, Any]) -> None:
        said = report(replace(WELL, **facts))
        assert [one.reason for one in external.suitability(tier(), said, None, DOMAIN)] == ["Suitable"]
        assert external.warning(tier(), said, DOMAIN) is None

    def test_what_needs_no_figures_is_checked_of_a_user_who_may_not_ask_for_them(self) -> None:
        said = report(replace(WELL, version="", max_bytes=0, eviction="", in_cluster_mode=None))
        assert external.missing(tier(), said, DOMAIN) is None
        assert external.warning(tier(), said, DOMAIN) is None

    def test_a_message_names_few_of_many_commands(self) -> None:
        decision = external.missing(tier(), report(replace(WELL, keys_refused=tuple("abcdefghij"))), DOMAIN)
        assert decision is not None
        assert "a, b, c, d, e, f and 4 more" in decision.message


class TestACluster:
    def test_is_covered_when_all_slots_have_a_server_that_answers(self) -> None:
        suitable, covered = external.suitability(tier(cluster=True), clustered(IN_CLUSTER, IN_CLUSTER), None, DOMAIN)
        assert (suitable.reason, covered.status, covered.reason) == ("Suitable", "True", "SlotsCovered")

    @pytest.mark.parametrize(
        ("servers", "reason", "words"),
        [
            ((IN_CLUSTER, replace(IN_CLUSTER, slots=8000)), "SlotsUncovered", "192 of 16384 slots belong to no server"),
            ((IN_CLUSTER, replace(AWAY, slots=8192)), "ServersAway", "1 of 2 primaries, with 8192 of 16384 slots"),
        ],
    )
    def test_with_a_hole_is_not_taken_up(self, servers: tuple[ServerFacts, ...], reason: str, words: str) -> None:
        said = clustered(*servers)
        suitable, covered = external.suitability(tier(cluster=True), said, None, DOMAIN)
        assert (suitable.status, suitable.reason) == (covered.status, covered.reason) == ("False", reason)
        assert words in covered.message
        assert external.servers_to_use(tier(cluster=True), said, DOMAIN) is None

    @pytest.mark.parametrize(
        ("facts", "reason"),
        [
            ({"version": "6.2.0"}, "TooOld"),
            ({"refused": ("eval",)}, "MissingPermissions"),
            ({"eviction": "volatile-ttl"}, "NotNoeviction"),
            ({"max_bytes": 0}, "MemoryUnbounded"),
        ],
    )
    def test_one_primary_that_fails_a_check_is_named(self, facts: dict[str, Any], reason: str) -> None:
        said = clustered(IN_CLUSTER, replace(IN_CLUSTER, **facts))
        suitable, _ = external.suitability(tier(cluster=True), said, None, DOMAIN)
        assert suitable.reason == reason
        assert "b:6379" in suitable.message

    def test_is_large_enough_by_all_primaries_together(self) -> None:
        """A cluster's blocks may take 65 percent of 64Mi."""
        for each, expected in ((21 * MIB, "Suitable"), (20 * MIB, "ServerTooSmall")):
            said = clustered(*(replace(IN_CLUSTER, max_bytes=each) for _ in range(2)))
            assert external.suitability(tier(cluster=True), said, None, DOMAIN)[0].reason == expected

    def test_a_server_that_is_none_of_a_cluster_is_told_from_slots_without_one(self) -> None:
        suitable, covered = external.suitability(tier(cluster=True), report(WELL), None, DOMAIN)
        assert (suitable.status, suitable.reason) == ("False", "ClusterModeMismatch")
        assert (covered.status, covered.reason) == ("Unknown", "ClusterModeMismatch")


def simulated(*servers: ServerFacts, **spec: Any) -> Simulation:
    """A model on memory and an external tier whose server says this."""
    shared = redis_tier(**{"redis": declared("a:6379"), **spec})
    simulation = Simulation(shared, cpu_tier(), model(tiers=("cpu", "shared")), pod("pod-0"))
    say(simulation, *servers)
    simulation.come_to_rest()
    return simulation


def say(simulation: Simulation, *servers: ServerFacts) -> None:
    simulation.external["shared"] = ExternalReport(servers)


def bound(simulation: Simulation) -> tuple[str, str]:
    return simulation.condition("CachedModel", "tiny", "TiersBound")


def ready(simulation: Simulation) -> tuple[str, str]:
    return simulation.condition("CacheTier", "shared", "Ready")


def used(simulation: Simulation) -> list[tuple[Server, ...]]:
    """The servers of the Redis tiers that the model's pods use."""
    return [one.servers for one in simulation.world.bundles["tiny"].bundle.root.tiers]


A = (Server("a", 6379),)
NEW = (Server("new", 6379),)
REPLICA = replace(WELL, is_replica=True)


class TestWhatPodsUse:
    def test_a_model_serves_without_a_tier_until_its_servers_have_passed(self) -> None:
        simulation = simulated(REPLICA)
        assert (ready(simulation), bound(simulation)) == (("False", "ReadOnlyReplica"), ("False", "TierNotReady"))
        assert used(simulation) == []
        assert simulation.condition("CachedModel", "tiny", "Ready")[0] == "True"
        assert simulation.condition("CacheTier", "shared", "EvictsWhenFull") == ("", "")
        say(simulation, WELL)
        simulation.advance(5)
        assert (ready(simulation)[0], bound(simulation)[0], used(simulation)) == ("True", "True", [A])

    def test_a_tier_in_use_that_gets_worse_stays_in_use_and_says_so(self) -> None:
        simulation = simulated(WELL)
        for worse, reason in ((REPLICA, "ReadOnlyReplica"), (replace(WELL, refused=("eval",)), "MissingPermissions")):
            say(simulation, worse)
            simulation.advance(20)
            assert (ready(simulation), used(simulation)) == (("False", reason), [A])
            assert bound(simulation) == ("False", "TierNotReady")
        simulation.backends_up = False
        simulation.advance(20)
        assert (ready(simulation), used(simulation)) == (("False", "Unreachable"), [A])
        assert simulation.condition("CacheTier", "shared", "ServersSuitable") == ("Unknown", "Unreachable")

    def test_pods_go_on_with_the_servers_of_before_while_new_ones_fail(self) -> None:
        simulation = simulated(WELL)
        say(simulation, replace(WELL, in_cluster_mode=True))
        simulation.edit("CacheTier", "shared", redis=declared("new:6379", username="someone"))
        simulation.come_to_rest()
        assert (ready(simulation), used(simulation)) == (("False", "ClusterModeMismatch"), [A])
        say(simulation, WELL)
        simulation.advance(5)
        assert (ready(simulation)[0], used(simulation)) == ("True", [NEW])
        assert simulation.status("CacheTier", "shared")["external"] == {
            "endpoints": ["new:6379"], "username": "someone"
        }  # fmt: skip

    def test_pods_that_lost_the_old_server_get_the_new_one(self) -> None:
        simulation = simulated(WELL)
        simulation.ack("pod-0", tiers=(TierState("shared", "Redis", "open"),))
        simulation.settle()
        simulation.edit("CacheTier", "shared", redis=declared("new:6379"))
        simulation.advance(5)
        assert ready(simulation) == ("False", "PodsDisconnected")
        assert used(simulation) == [NEW]

    def test_an_answer_to_another_password_lets_no_pod_in(self) -> None:
        simulation = simulated(WELL)
        simulation.backends_up = False
        simulation.edit("CacheTier", "shared", redis=declared("a:6379", authSecretRef={"name": "other"}))
        simulation.come_to_rest()
        assert "authSecretRef" not in simulation.status("CacheTier", "shared")["external"]

    def test_what_was_taken_from_a_spec_is_gone_from_the_servers_in_use(self) -> None:
        simulation = simulated(WELL, redis=declared("a:6379", authSecretRef={"name": "login"}))
        simulation.edit("CacheTier", "shared", redis=declared("a:6379"))
        simulation.come_to_rest()
        assert simulation.status("CacheTier", "shared")["external"] == {"endpoints": ["a:6379"]}

    @pytest.mark.parametrize("servers", [(WELL,), (REPLICA,)])
    def test_an_operator_that_starts_anew_writes_nothing_before_it_has_asked(self, servers: tuple[Any, ...]) -> None:
        simulation = simulated(*servers)
        before = simulation.status("CacheTier", "shared"), simulation.status("CachedModel", "tiny")
        other = simulation.clone()
        say(other, *servers)
        other.come_to_rest()
        assert (other.status("CacheTier", "shared"), other.status("CachedModel", "tiny")) == before

    def test_a_tier_that_was_ready_before_there_were_checks_stays_in_use(self) -> None:
        simulation = simulated(WELL)
        raw = dict(simulation.kube.objects[("CacheTier", NAMESPACE, "shared")])
        old = {**raw["status"], "external": None}
        old["conditions"] = [one for one in old["conditions"] if one["type"] != "ServersSuitable"]
        simulation.put({**raw, "status": {key: value for key, value in old.items() if value is not None}})
        simulation.restart()
        say(simulation, REPLICA)
        simulation.advance(20)
        assert (ready(simulation), used(simulation)) == (("False", "ReadOnlyReplica"), [A])

    def test_another_tier_may_not_have_a_server_that_pods_still_use(self) -> None:
        simulation = simulated(WELL)
        say(simulation, REPLICA)
        simulation.edit("CacheTier", "shared", redis=declared("new:6379"))
        simulation.put(redis_tier("younger", redis=declared("a:6379")))
        simulation.come_to_rest()
        assert simulation.condition("CacheTier", "younger", "Stalled") == ("True", "TiersConflict")
        say(simulation, WELL)
        simulation.advance(10)
        assert simulation.condition("CacheTier", "younger", "Ready")[0] == "True"

    def test_a_warning_is_the_reason_of_a_tier_that_is_ready(self) -> None:
        simulation = simulated(replace(WELL, eviction="allkeys-lfu"))
        assert (ready(simulation), bound(simulation)[0]) == (("True", "NotNoeviction"), "True")

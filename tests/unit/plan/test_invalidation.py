"""Invalidations: every pod's word, every phase resumable, and no success that nobody earned."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kvstrata.plan.rules import invalidation as chain
from tests.support.memory_kube import MemoryKube
from tests.support.objects import group, invalidation, policy
from tests.support.worlds import Simulation

from .invalidations import KIND, at_rest, phase, phases


def test_an_invalidation_waits_for_every_pod_and_then_completes() -> None:
    simulation = at_rest(policy("acme"), policy("globex"))
    before = {tenant: simulation.entry(tenant).keyspace for tenant in ("acme", "globex")}
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    assert before["acme"] not in simulation.bundle().keyspaces
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    assert simulation.condition(KIND, "now", "LogicallyInvalid") == ("False", "AwaitingAcks")
    simulation.ack("pod-1")
    simulation.settle()
    assert phases(simulation) == ["Rolling", "AwaitingAcks", "Complete"]
    assert simulation.condition(KIND, "now", "LogicallyInvalid")[0] == "True"
    assert simulation.condition(KIND, "now", "Ready")[0] == "True"
    assert simulation.status(KIND, "now")["pods"] == {"acked": 2, "live": 2, "fenced": 0}
    assert simulation.entry("globex").keyspace == before["globex"]
    assert simulation.status("TenantCachePolicy", "acme")["scope"]["rolls"] == 1
    assert simulation.unsettled() == {}


def test_past_its_deadline_it_fails_and_says_what_stays() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    before = simulation.entry("acme").keyspace
    simulation.put(invalidation("now", scope={"tenant": "acme"}, deadline="1m"))
    simulation.settle()
    simulation.advance(50)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(20)
    assert phase(simulation) == "Failed"
    assert simulation.condition(KIND, "now", "Failed") == ("True", "DeadlineExceeded")
    assert simulation.entry("acme").keyspace != before


def test_a_deadline_that_passed_while_no_operator_ran_fails_by_name_and_brings_no_epoch_back() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    before = simulation.entry("acme").keyspace
    simulation.put(invalidation("now", scope={"tenant": "acme"}, deadline="1m"))
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    simulation.now += timedelta(hours=1)
    simulation.restart()
    simulation.settle()
    assert simulation.condition(KIND, "now", "Failed") == ("True", "DeadlineExceeded")
    assert before not in simulation.bundle().keyspaces
    assert simulation.unsettled() == {}


PREFIX = {"prefix": {"modelRef": {"name": "tiny"}, "content": {"text": "x"}}}
EXACT = {"mode": "Eager", "hbm": "ResetEngine"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"scope": {"model": "nobody"}}, "ModelNotFound"),
        ({"scope": {"pool": "p"}}, "PoolNotFound"),
        ({"scope": {"prefix": {**PREFIX["prefix"], "modelRef": {"name": "no"}}}, **EXACT}, "ModelNotFound"),
        ({"scope": {"prefix": {**PREFIX["prefix"], "tenants": ["acme", "no"]}}, **EXACT}, "TenantNotFound"),
        ({"scope": {"prefix": {**PREFIX["prefix"], "tenants": ["member"]}}, **EXACT}, "SharedScopeChoiceRequired"),
        ({"scope": {"tenant": "nobody"}}, "TenantNotFound"),
        ({"scope": {"group": "nobody"}}, "GroupNotFound"),
        ({"scope": {"tenant": "member"}}, "SharedScopeChoiceRequired"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason_and_changes_nothing(spec: dict[str, Any], reason: str) -> None:
    simulation = at_rest(policy("acme"), group("lab", "member"), policy("member", group="lab"))
    before = simulation.bundle()
    simulation.put(invalidation("now", **spec))
    simulation.come_to_rest()
    assert phase(simulation) == "Failed"
    assert simulation.condition(KIND, "now", "Stalled") == ("True", reason)
    assert simulation.bundle() == before


@pytest.mark.parametrize(("mode", "limit"), [("Eager", "MAX_ERASED_SCOPES"), ("Lazy", "MAX_SCOPES")])
def test_more_scopes_than_can_be_written_down_are_refused_and_as_many_are_not(
    monkeypatch: pytest.MonkeyPatch, mode: str, limit: str
) -> None:
    simulation = at_rest(policy("acme"), policy("globex"))
    before = simulation.bundle()
    monkeypatch.setattr(chain, limit, 2)
    simulation.put(invalidation("now", scope={"all": True}, mode=mode))
    simulation.settle()
    assert simulation.condition(KIND, "now", "Stalled") == ("True", "TooManyScopes")
    assert "comes to 3 scopes" in simulation.status(KIND, "now")["message"]
    assert simulation.bundle() == before
    monkeypatch.setattr(chain, limit, 3)
    simulation.put(invalidation("again", scope={"all": True}, mode=mode))
    simulation.settle()
    assert phase(simulation, "again") in ("Rolling", "AwaitingAcks")


class Killed(BaseException):
    """The operator's process is gone."""


def _kill_at(kube: MemoryKube, number: int, *, after: bool) -> None:
    count = 0

    def hook(verb: str, kind: str, name: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise Killed

    if after:
        kube.after_write = hook
    else:
        kube.before_write = hook


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, 13))
def test_an_operator_killed_at_any_write_resumes_and_never_rolls_twice(number: int, after: bool) -> None:
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"), policy("c"))
    before = simulation.bundle().keyspaces
    revision = simulation.bundle().root.revision
    _kill_at(simulation.kube, number, after=after)
    try:
        simulation.kube.objects  # noqa: B018  (the user's write is not the operator's)
        hook, simulation.kube.after_write = simulation.kube.after_write, lambda verb, kind, name: None
        simulation.kube.put(invalidation("now", scope={"all": True}))
        simulation.kube.after_write = hook
        simulation._deliver()
        simulation.come_to_rest()
    except Killed:
        pass
    simulation.restart()
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert not before & simulation.bundle().keyspaces
    for kind, name in (("TenantGroup", "lab"), ("TenantCachePolicy", "c"), ("CacheDomain", "default")):
        assert simulation.status(kind, name)["scope"]["rolls"] == 1
    assert simulation.bundle().root.revision > revision
    assert simulation.unsettled() == {}


def test_a_finished_invalidation_is_deleted_after_its_time_to_live_and_not_before() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}, ttlSecondsAfterFinished=60))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    simulation.advance(40)
    assert "now" in simulation.world.invalidations
    simulation.advance(30)
    assert "now" not in simulation.world.invalidations


def test_an_invalidation_that_comes_before_the_domain_waits_for_it() -> None:
    simulation = Simulation(invalidation("now", scope={"all": True}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"


def test_an_invalidation_leaves_the_epoch_of_a_policy_that_is_being_deleted() -> None:
    # Its own erasure may have to try again, and finds by that epoch what the tenant had.
    leaving = policy("acme", deletionPolicy="Erase")
    simulation = at_rest(leaving, policy("globex"))
    before = {name: simulation.status("TenantCachePolicy", name)["scope"]["epoch"] for name in ("acme", "globex")}
    simulation.delete("TenantCachePolicy", "acme")
    simulation.put(invalidation("now", scope={"all": True}))
    simulation.settle()
    assert simulation.status("TenantCachePolicy", "acme")["scope"]["epoch"] == before["acme"]
    assert simulation.status("TenantCachePolicy", "globex")["scope"]["epoch"] != before["globex"]
    for pod in ("pod-0", "pod-1"):
        simulation.ack(pod)
    simulation.settle()
    assert phase(simulation) == "Complete"

"""Pods of a model that no member of a group ever shared blocks in do not hold up the group's invalidation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.objects.names import bundle_root
from kvstrata.plan.bundle.compile import still_allowed
from kvstrata.plan.scopes import group_scope
from tests.support.objects import NAMESPACE, group, model, pod, policy
from tests.support.worlds import Killed, Simulation

from .invalidations import at_rest, phase
from .test_models_of_a_policy import BOTH, TINY, order, with_a_silent_pod

GROUP, POLICY = "TenantGroup", "TenantCachePolicy"
OTHER: dict[str, Any] = {"models": {"names": ["other"]}}


def recorded(simulation: Simulation) -> Any:
    return simulation.status(GROUP, "lab")["scope"].get("models")


def lab(**globex: Any) -> Simulation:
    """A group on tiny; globex is a member of it, too."""
    return with_a_silent_pod(
        group("lab", "acme", "globex"), policy("acme", group="lab", **TINY), policy("globex", group="lab", **globex)
    )


@pytest.mark.parametrize("scope", [{"group": "lab"}, {"tenant": "acme", "shared": "Roll"}])
def test_an_invalidation_of_a_group_waits_for_pods_of_its_models_alone(scope: dict[str, Any]) -> None:
    simulation = lab(**TINY)
    simulation.restart()
    simulation.settle()
    assert recorded(simulation) == ["tiny"]
    assert order(simulation, **scope) == "Complete"
    status = simulation.status("CacheInvalidation", "now")
    assert [target["model"] for target in status["targets"]] == ["tiny"]
    assert status["pods"] == {"acked": 2, "live": 2, "fenced": 0}


def leaves(simulation: Simulation) -> None:
    simulation.edit(GROUP, "lab", members=["acme"])


def goes(simulation: Simulation) -> None:
    simulation.delete(POLICY, "globex")


def moves(simulation: Simulation) -> None:
    simulation.edit(POLICY, "globex", **TINY)


def isolates(simulation: Simulation) -> None:
    simulation.edit(POLICY, "globex", isolation="Isolated", groupRef=None)


@pytest.mark.parametrize("change", [leaves, goes, moves, isolates])
def test_an_invalidation_waits_for_pods_of_every_model_that_a_member_ever_had(
    change: Callable[[Simulation], None],
) -> None:
    simulation = lab(**OTHER)
    assert recorded(simulation) == ["other", "tiny"]
    change(simulation)
    simulation.settle()
    simulation.restart()
    simulation.settle()
    assert group_scope("lab") not in [entry.scope for entry in simulation.bundle("other").entries.values()]
    assert recorded(simulation) == ["other", "tiny"]
    assert order(simulation, group="lab") == "AwaitingAcks"
    simulation.ack("silent")
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_a_member_on_every_model_brings_the_group_to_each_also_to_a_later_one() -> None:
    simulation = lab(**TINY)
    simulation.edit(POLICY, "globex", models=None)
    simulation.settle()
    assert recorded(simulation) == ["other", "tiny"]
    simulation.put(model("later"))
    simulation.settle()
    assert recorded(simulation) == ["later", "other", "tiny"]
    assert "globex" in simulation.bundle("later").entries
    assert order(simulation, group="lab") == "AwaitingAcks"


def test_a_group_on_too_many_models_may_be_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = lab(**TINY)
    monkeypatch.setattr("kvstrata.plan.kinds.group.MAX_REACHED", 1)
    simulation.edit(POLICY, "globex", **BOTH)
    simulation.settle()
    assert recorded(simulation) is None
    assert "globex" in simulation.bundle("other").entries
    assert order(simulation, group="lab") == "AwaitingAcks"


def test_a_group_of_an_earlier_version_may_be_anywhere_until_it_draws_an_epoch() -> None:
    simulation = lab(**TINY)
    raw = simulation.kube.objects[GROUP, NAMESPACE, "lab"]
    scope = {name: value for name, value in raw["status"]["scope"].items() if name != "models"}
    simulation.put({**raw, "status": {**raw["status"], "scope": scope}})
    simulation.settle()
    assert recorded(simulation) is None
    simulation.edit(GROUP, "lab", cacheGeneration=1)
    simulation.settle()
    assert recorded(simulation) == ["tiny"]
    assert order(simulation, group="lab") == "Complete"


def test_a_group_that_was_created_first_begins_with_no_model() -> None:
    simulation = at_rest(group("lab", "acme"), onStale="ServeStale")
    assert recorded(simulation) == []
    assert order(simulation, group="lab") == "Complete"
    simulation.put(policy("acme", group="lab", **TINY))
    simulation.settle()
    assert recorded(simulation) == ["tiny"]
    assert "acme" in simulation.bundle("tiny").entries


def test_a_model_is_recorded_before_its_bundle_has_the_group() -> None:
    simulation = at_rest(
        model("other"), group("lab", "acme"), policy("acme", group="lab", **TINY), policy("globex", **OTHER)
    )
    seen = []

    def hook(verb: str, kind: str, name: str) -> None:
        if kind == "Secret" and name.startswith(bundle_root("other")):
            entries = simulation.bundle("other").entries.values()
            seen.append(group_scope("lab") not in [entry.scope for entry in entries] or "other" in recorded(simulation))

    simulation.kube.after_write = hook
    simulation.edit(GROUP, "lab", members=["acme", "globex"])
    simulation.edit(POLICY, "globex", isolation="Group", groupRef={"name": "lab"})
    simulation.settle()
    assert simulation.bundle("other").entries["globex"].scope == group_scope("lab")
    assert seen
    assert all(seen)


@pytest.mark.parametrize("number", range(1, 7))
def test_an_operator_that_ends_while_a_group_reaches_a_model_forgets_no_model(number: int) -> None:
    simulation = at_rest(model("other"), group("lab", "acme"), policy("acme", group="lab", **TINY))
    simulation.kill_at(number, after=True)
    simulation.edit(POLICY, "acme", **BOTH)
    with suppress(Killed):
        simulation.settle()
    simulation.restart()
    assert "acme" not in simulation.bundle("other").entries or "other" in recorded(simulation)
    simulation.settle()
    assert "acme" in simulation.bundle("other").entries


def test_a_last_valid_entry_gets_no_epoch_of_a_group_whose_record_lacks_the_model() -> None:
    simulation = lab(**OTHER)
    world = simulation.world
    found, kept = world.policies["globex"], simulation.bundle("other").entries["globex"]
    assert isinstance(found, TenantCachePolicy)
    assert not still_allowed(world, world.models["other"], found, kept).suspended
    holder = world.groups["lab"]
    assert holder.status.scope is not None
    scope = holder.status.scope.model_copy(update={"models": ("tiny",)})
    status = holder.status.model_copy(update={"scope": scope})
    world.groups["lab"] = holder.model_copy(update={"status": status})
    assert still_allowed(world, world.models["other"], found, kept).suspended


def test_a_pod_of_a_model_that_the_group_reaches_during_its_invalidation_has_the_new_epoch_alone() -> None:
    simulation = lab(**TINY)
    assert order(simulation, group="lab") == "Complete"
    before = simulation.status(GROUP, "lab")["scope"]["epoch"]
    simulation.put(pod("later", "other"))
    simulation.edit(POLICY, "globex", **BOTH)
    simulation.settle()
    assert recorded(simulation) == ["other", "tiny"]
    assert simulation.status(GROUP, "lab")["scope"]["epoch"] == before

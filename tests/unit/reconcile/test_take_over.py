"""Foreign objects that are taken over: their own annotation names the parent that may have their name."""

from __future__ import annotations

import pytest

from kvstrata.objects import names
from kvstrata.plan.ownership import TAKE_OVER
from tests.support.objects import NAMESPACE, Raw, policy
from tests.support.worlds import Simulation
from tests.unit.reconcile.test_foreign_objects import (
    DOMAIN,
    EACH_CHILD,
    MODEL,
    OBJECTS,
    TIER,
    foreign,
    in_the_way,
    live,
    owners,
    replace_by_foreign,
)
from tests.unit.reconcile.test_taking_back import as_backup_tools_do, settled

Slot = tuple[str, str]


def annotate(simulation: Simulation, slot: Slot, value: str) -> None:
    raw = live(simulation, *slot)
    annotations = {**raw["metadata"].get("annotations", {}), TAKE_OVER: value}
    simulation.put({**raw, "metadata": {**raw["metadata"], "annotations": annotations}})


def proposed(simulation: Simulation, owner: Slot) -> list[Slot]:
    """The objects of the command that the owner's message ends with; empty without a conflict."""
    message = in_the_way(simulation, owner)
    if not message:
        return []
    before, _, command = message.partition(": kubectl ")
    where, verb, *listed, value = command.removeprefix("-n ").split()
    assert (where, verb, value) == (NAMESPACE, "annotate", f"{TAKE_OVER}={owner[0]}/{owner[1]}")
    found = [(kind, name) for kind, _, name in (one.partition("/") for one in listed)]
    assert ", ".join(map(" ".join, found)) in before
    return found


def take_over(simulation: Simulation, owner: Slot) -> list[Slot]:
    """Run the command of the owner's message; return its objects."""
    found = proposed(simulation, owner)
    for slot in found:
        annotate(simulation, slot, "/".join(owner))
    return found


@EACH_CHILD
def test_an_annotated_object_is_replaced_and_nothing_of_it_remains(kind: str, name: str, owner: Slot) -> None:
    simulation = Simulation(foreign(kind, name), *OBJECTS)
    simulation.advance(60)
    before: Raw = live(simulation, kind, name)
    assert take_over(simulation, owner) == [(kind, name)]
    simulation.advance(30)
    simulation.come_to_rest()
    after = live(simulation, kind, name)
    assert owners(after) == [owner]
    assert in_the_way(simulation, owner) == ""
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert TAKE_OVER not in after["metadata"].get("annotations", {}), "a permission is used once"
    assert "app" not in after["metadata"]["labels"]
    assert "mine" not in after.get("data", {})
    assert "app" not in after.get("spec", {}).get("selector", {})
    assert simulation.unsettled() == {}


def test_only_annotated_objects_are_taken_over() -> None:
    simulation = Simulation(foreign("Service", "kvs-tiny"), foreign("ServiceAccount", "kvs-tiny"), *OBJECTS)
    simulation.advance(60)
    annotate(simulation, ("Service", "kvs-tiny"), "CachedModel/tiny")
    before = live(simulation, "ServiceAccount", "kvs-tiny")
    simulation.advance(60)
    assert proposed(simulation, MODEL) == [("ServiceAccount", "kvs-tiny")]
    assert live(simulation, "ServiceAccount", "kvs-tiny") == before


def test_every_conflict_is_named_at_once_labelled_or_not_secret_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored with another installation's marks: nothing is named only after another was taken over."""
    monkeypatch.setattr("kvstrata.contract.policy.bundle.MAX_SHARD_BYTES", 600)
    simulation = as_backup_tools_do(settled(*map(policy, ("globex", "initech", "umbrella"))), b"another installation")
    simulation.advance(30)
    assert take_over(simulation, DOMAIN) == [("Secret", "kvstrata-domain")]
    simulation.advance(30)
    assert len(take_over(simulation, TIER)) == 6
    taken = take_over(simulation, MODEL)
    assert [name for _, name in taken if "bundle" in name] == [
        "kvs-tiny-bundle",
        *(names.bundle_shard("tiny", index, "a") for index in range(2)),
    ]
    assert len(taken) == 11
    simulation.advance(60)
    assert in_the_way(simulation, MODEL) == ""
    simulation.come_to_rest()
    assert simulation.unsettled() == {}


def test_a_key_that_others_may_know_is_not_taken_over_with_its_secret() -> None:
    known = foreign("Secret", names.DOMAIN_KEY_SECRET)
    known["data"] = {names.DOMAIN_KEY_DATA_KEY: "a" * 43 + "="}
    simulation = Simulation(known, *OBJECTS)
    simulation.advance(30)
    assert take_over(simulation, DOMAIN) == [("Secret", names.DOMAIN_KEY_SECRET)]
    simulation.advance(30)
    simulation.come_to_rest()
    drawn = live(simulation, "Secret", names.DOMAIN_KEY_SECRET)["data"][names.DOMAIN_KEY_DATA_KEY]
    assert drawn != "a" * 43 + "="
    assert owners(live(simulation, "Secret", names.DOMAIN_KEY_SECRET)) == [DOMAIN]


@pytest.mark.parametrize(
    "value", ["", "tiny", "CachedModel/", "CachedModel/other", "CacheTier/tiny", "CachedModel/tiny/"]
)
def test_an_annotation_that_names_another_parent_takes_nothing_over(value: str) -> None:
    simulation = Simulation(foreign("Service", "kvs-tiny"), *OBJECTS)
    annotate(simulation, ("Service", "kvs-tiny"), value)
    simulation.advance(30)
    assert owners(live(simulation, "Service", "kvs-tiny")) == []
    assert "Service kvs-tiny" in in_the_way(simulation, MODEL)


def test_the_right_to_edit_a_model_takes_nothing_over() -> None:
    """Its user may lack the right to Services; the operator has it, and must not act as a deputy."""
    simulation = Simulation(foreign("Service", "kvs-tiny"), *OBJECTS)
    simulation.advance(30)
    before = live(simulation, "Service", "kvs-tiny")
    assert owners(before) == []
    for value in (f"Service/kvs-tiny/{before['metadata']['uid']}", "Service/kvs-tiny", "CachedModel/tiny"):
        annotate(simulation, MODEL, value)
        simulation.advance(60)
        assert live(simulation, "Service", "kvs-tiny") == before


@pytest.mark.parametrize("kind", ["Service", "Secret"])
def test_a_later_object_under_a_name_that_was_taken_over_is_not_taken_over_too(kind: str) -> None:
    name = {"Service": "kvs-tiny", "Secret": "kvs-tiny-gate-tls"}[kind]
    simulation = Simulation(foreign(kind, name), *OBJECTS)
    simulation.advance(60)
    take_over(simulation, MODEL)
    simulation.advance(30)
    simulation.come_to_rest()
    assert owners(live(simulation, kind, name)) == [MODEL]
    simulation.delete(kind, name, seen=False)
    simulation.put(foreign(kind, name))
    before = live(simulation, kind, name)
    simulation.enqueue_all()
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    assert proposed(simulation, MODEL) == [(kind, name)]


def test_an_object_that_replaced_the_annotated_one_is_left_alone() -> None:
    """The deletion carries the UID of the object that was read."""
    simulation = Simulation(foreign("Service", "kvs-tiny"), *OBJECTS)
    simulation.advance(30)
    take_over(simulation, MODEL)
    came: list[Raw] = []

    def come_between(verb: str, kind: str, name: str) -> None:
        if (verb, kind, name) == ("delete", "Service", "kvs-tiny") and not came:
            came.append({})
            replace_by_foreign(simulation, kind, name)
            came[0] = live(simulation, kind, name)

    simulation.kube.before_write = come_between
    simulation.advance(60)
    assert came == [live(simulation, "Service", "kvs-tiny")]
    assert proposed(simulation, MODEL) == [("Service", "kvs-tiny")]

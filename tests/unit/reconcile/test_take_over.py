"""Foreign objects that the user of a parent takes over, by an annotation that lists them."""

from __future__ import annotations

import pytest

from kvstrata.objects import names
from kvstrata.plan.ownership import TAKE_OVER
from tests.support.objects import Raw, policy
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
)
from tests.unit.reconcile.test_taking_back import as_backup_tools_do, settled


def annotate(simulation: Simulation, owner: tuple[str, str], listed: str) -> None:
    raw = live(simulation, *owner)
    simulation.put({**raw, "metadata": {**raw["metadata"], "annotations": {TAKE_OVER: listed}}})


def proposed(message: str) -> str:
    """The annotation that a message proposes."""
    return message.partition(f'{TAKE_OVER}: "')[2].partition('"')[0]


def listing(raw: Raw) -> str:
    return f"{raw['kind']}/{raw['metadata']['name']}/{raw['metadata']['uid']}"


@EACH_CHILD
def test_a_listed_object_is_taken_over_with_content_of_its_new_parent(
    kind: str, name: str, owner: tuple[str, str]
) -> None:
    simulation = Simulation(foreign(kind, name), *OBJECTS)
    simulation.advance(60)
    listed = proposed(in_the_way(simulation, owner))
    before: Raw = live(simulation, kind, name)
    assert listed == listing(before)
    annotate(simulation, owner, listed)
    simulation.advance(30)
    simulation.come_to_rest()
    after = live(simulation, kind, name)
    assert owners(after) == [owner]
    assert in_the_way(simulation, owner) == ""
    if kind in ("Deployment", "StatefulSet"):
        assert after["metadata"]["uid"] == before["metadata"]["uid"], "its pods stay"
    else:
        assert "mine" not in after.get("data", {})
        assert after.get("spec", {}).get("selector", {}).get("app") != "somebody"
    assert simulation.unsettled() == {}


def test_only_listed_objects_are_taken_over() -> None:
    simulation = Simulation(foreign("Service", "kvs-tiny"), foreign("ServiceAccount", "kvs-tiny"), *OBJECTS)
    simulation.advance(60)
    service = listing(live(simulation, "Service", "kvs-tiny"))
    annotate(simulation, MODEL, f"{service}, Service/kvs-other/1")
    before = live(simulation, "ServiceAccount", "kvs-tiny")
    simulation.advance(60)
    message = in_the_way(simulation, MODEL)
    assert "needs: ServiceAccount kvs-tiny." in message
    assert service in proposed(message), "the proposed value keeps those that are listed"
    assert live(simulation, "ServiceAccount", "kvs-tiny") == before


def test_every_conflict_is_named_at_once_labelled_or_not_secret_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored with another installation's marks: nothing is named only after another was taken over."""
    monkeypatch.setattr("kvstrata.contract.policy.bundle.MAX_SHARD_BYTES", 600)
    simulation = as_backup_tools_do(settled(*map(policy, ("globex", "initech", "umbrella"))), b"another installation")
    simulation.advance(30)
    taken = {owner: proposed(in_the_way(simulation, owner)).split(",") for owner in (TIER, DOMAIN)}
    assert taken[DOMAIN] == [listing(live(simulation, "Secret", "kvstrata-domain"))]
    annotate(simulation, DOMAIN, ",".join(taken[DOMAIN]))
    simulation.advance(30)
    taken = {owner: proposed(in_the_way(simulation, owner)).split(",") for owner in (TIER, MODEL)}
    assert len(taken[TIER]) == 6
    assert [one.split("/")[1] for one in taken[MODEL] if "bundle" in one] == [
        "kvs-tiny-bundle",
        *(names.bundle_shard("tiny", index, "a") for index in range(2)),
    ]
    assert len(taken[MODEL]) == 11
    for owner, listed in taken.items():
        annotate(simulation, owner, ",".join(listed))
    simulation.advance(60)
    assert in_the_way(simulation, MODEL) == ""
    simulation.come_to_rest()
    assert simulation.unsettled() == {}


def test_a_key_that_others_may_know_is_not_taken_over_with_its_secret() -> None:
    known = foreign("Secret", names.DOMAIN_KEY_SECRET)
    known["data"] = {names.DOMAIN_KEY_DATA_KEY: "a" * 43 + "="}
    simulation = Simulation(known, *OBJECTS)
    simulation.advance(30)
    annotate(simulation, DOMAIN, listing(live(simulation, "Secret", names.DOMAIN_KEY_SECRET)))
    simulation.come_to_rest()
    drawn = live(simulation, "Secret", names.DOMAIN_KEY_SECRET)["data"][names.DOMAIN_KEY_DATA_KEY]
    assert drawn != "a" * 43 + "="
    assert owners(live(simulation, "Secret", names.DOMAIN_KEY_SECRET)) == [DOMAIN]


@pytest.mark.parametrize(
    "listed", ["", "kvs-tiny", "Service/kvs-tiny", "Service/kvs-tiny/", "Service/kvs-tiny/other", ",,"]
)
def test_an_annotation_that_names_no_object_takes_nothing_over(listed: str) -> None:
    simulation = Simulation(foreign("Service", "kvs-tiny"), *OBJECTS)
    annotate(simulation, MODEL, listed)
    simulation.advance(30)
    assert owners(live(simulation, "Service", "kvs-tiny")) == []


@pytest.mark.parametrize("kind", ["Service", "Secret"])
def test_a_later_object_under_a_name_that_was_taken_over_is_not_taken_over_too(kind: str) -> None:
    name = {"Service": "kvs-tiny", "Secret": "kvs-tiny-gate-tls"}[kind]
    simulation = Simulation(foreign(kind, name), *OBJECTS)
    simulation.advance(60)
    annotate(simulation, MODEL, proposed(in_the_way(simulation, MODEL)))
    simulation.come_to_rest()
    assert owners(live(simulation, kind, name)) == [MODEL]
    simulation.delete(kind, name, seen=False)
    simulation.put(foreign(kind, name))
    before = live(simulation, kind, name)
    simulation.enqueue_all()
    simulation.advance(60)
    assert live(simulation, kind, name) == before
    assert listing(before) in proposed(in_the_way(simulation, MODEL))

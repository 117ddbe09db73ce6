"""One installation of the operator serves a namespace; a later one writes nothing there but an Event."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata.api.cachedomain import Installation
from kvstrata.clients.kube import NotLeadingError
from kvstrata.clients.resources import BY_KIND, SECRET
from kvstrata.contract.receipt.record import Head, Link
from kvstrata.plan.claim import SERVED_BY, served_by_another
from kvstrata.plan.erasure.receipt_chain import ChainState
from kvstrata.reconcile import metrics
from kvstrata.reconcile.erasure.receipt_chain import record_chain
from kvstrata.reconcile.secrets import AUTHORITY_SECRET, SecretStore
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, cpu_tier, domain, model, policy
from tests.support.worlds import Simulation, finish
from tests.unit.reconcile.deletions import acked_until, phase, run, world
from tests.unit.reconcile.erasing import World

FIRST = Installation(uid="first", namespace="ops-a", release="a")
SECOND = Installation(uid="second", namespace="ops-b", release="b")
DOMAIN = ("CacheDomain", "default")
DOMAIN_RESOURCE = BY_KIND["CacheDomain"]
OBJECTS = (domain(), cpu_tier(), model(tiers=("cpu",)), policy("acme"))


def served(by: Installation = FIRST) -> Simulation:
    simulation = Simulation(*OBJECTS)
    simulation.store.installation = by
    simulation.come_to_rest()
    return simulation


def lead(simulation: Simulation, installation: Installation) -> list[tuple[str, str, str]]:
    """Let another installation start; return its writes."""
    simulation.restart()
    simulation.store.installation = installation
    return writes(simulation)


def writes(simulation: Simulation) -> list[tuple[str, str, str]]:
    before = len(simulation.kube.log)
    simulation.advance(600)
    return simulation.kube.log[before:]


def claim(simulation: Simulation) -> Any:
    return simulation.status(*DOMAIN).get("servedBy")


def set_claim(simulation: Simulation, of: Installation | None) -> None:
    version = simulation.kube.objects["CacheDomain", NAMESPACE, "default"]["metadata"]["resourceVersion"]
    change = {"servedBy": of.to_kubernetes() if of is not None else None}
    finish(simulation.kube.patch_status(DOMAIN_RESOURCE, NAMESPACE, "default", change, version))


def choose(simulation: Simulation, uid: str) -> None:
    raw = dict(simulation.kube.objects["CacheDomain", NAMESPACE, "default"])
    simulation.put({**raw, "metadata": {**raw["metadata"], "annotations": {SERVED_BY: uid}}})


def kept(simulation: Simulation) -> list[Any]:
    """What a takeover must not change: identity, epochs, keys."""
    reported = [simulation.status(*DOMAIN), simulation.status("TenantCachePolicy", "acme")]
    keys = [simulation.kube.objects["Secret", NAMESPACE, "kvstrata-domain"]["data"]]
    return [*keys, reported[0]["domainID"], *(one["scope"] for one in reported)]


def events(simulation: Simulation) -> list[Any]:
    return [raw for (kind, *_), raw in simulation.kube.objects.items() if kind == "Event"]


def test_the_claim_is_an_installations_first_write_in_a_namespace() -> None:
    simulation = served()
    own = [entry for entry in simulation.kube.log if entry[0] != "put"]
    assert own[0] == ("status", *DOMAIN)
    assert claim(simulation) == FIRST.to_kubernetes()
    assert simulation.condition(*DOMAIN, "Ready")[0] == "True"
    assert not simulation.unsettled(), "what waited for the claim is done"


def test_a_claim_counts_in_an_object_that_a_later_installation_cannot_read() -> None:
    simulation = served()
    raw = dict(simulation.kube.objects["CacheDomain", NAMESPACE, "default"])
    simulation.kube.put({**raw, "spec": {**raw["spec"], "onStale": "InANewerVersion"}})
    assert lead(simulation, SECOND) == []


def test_a_later_installation_reports_the_first_and_writes_nothing_else() -> None:
    simulation = served()
    assert lead(simulation, SECOND) == [("create", "Event", events(simulation)[0]["metadata"]["name"])]
    (event,) = events(simulation)
    assert (event["type"], event["reason"]) == ("Warning", "ServedByAnother")
    assert event["message"] == (
        "CacheDomain team/default is claimed by the operator in namespace ops-a (release a): the operator in namespace "
        "ops-b (release b) writes nothing in this namespace. To have it serve the namespace, uninstall that release, "
        "or annotate the CacheDomain with kvstrata.io/served-by: second"
    )
    assert metrics.SERVED_BY_ANOTHER._value.get() == 1

    simulation.put(policy("globex"), policy("acme", isolation="Public"))
    simulation.delete("TenantCachePolicy", "globex")
    simulation.enqueue_all()
    assert [entry for entry in writes(simulation) if entry[0] != "put"] == [], "however often it looks"


def test_a_claim_that_ended_is_taken_over_with_identity_epochs_and_keys() -> None:
    simulation = served()
    before = kept(simulation)
    lead(simulation, SECOND)
    set_claim(simulation, None)
    simulation.come_to_rest()
    assert (claim(simulation), kept(simulation)) == (SECOND.to_kubernetes(), before)
    assert metrics.SERVED_BY_ANOTHER._value.get() == 0


def test_an_annotation_hands_over_and_the_former_leader_ends_before_it_writes_again() -> None:
    simulation = served()
    before, former = kept(simulation), len(simulation.kube.log)
    choose(simulation, SECOND.uid)
    with pytest.raises(NotLeadingError, match="handed over"):
        simulation.settle()
    assert {entry[:2] for entry in simulation.kube.log[former:]} == {("put", "CacheDomain"), ("create", "Event")}
    again = [entry[:2] for entry in lead(simulation, FIRST)]
    assert again == [("create", "Event"), ("status", "CacheDomain")], "its next leader does not end, and reports it"
    assert claim(simulation) == FIRST.to_kubernetes()
    assert simulation.condition(*DOMAIN, "Ready") == ("False", "ServedByAnother"), "as with a misspelled uid"

    lead(simulation, SECOND)
    simulation.come_to_rest()
    assert (claim(simulation), kept(simulation)) == (SECOND.to_kubernetes(), before)
    assert simulation.condition(*DOMAIN, "Ready")[0] == "True"


def test_a_corrected_annotation_ends_the_report_that_no_installation_serves_a_namespace() -> None:
    simulation = served()
    choose(simulation, "secnod")
    lead(simulation, FIRST)
    assert simulation.condition(*DOMAIN, "Ready") == ("False", "ServedByAnother")
    choose(simulation, FIRST.uid)
    simulation.come_to_rest()
    assert simulation.condition(*DOMAIN, "Ready")[0] == "True"


def test_a_renamed_release_of_the_same_installation_continues() -> None:
    simulation = served()
    before = kept(simulation)
    renamed = FIRST.model_copy(update={"release": "renamed"})
    assert lead(simulation, renamed) == [("status", *DOMAIN)]
    assert (claim(simulation), kept(simulation)) == (renamed.to_kubernetes(), before)
    assert events(simulation) == []


def test_the_claim_of_a_deleted_domain_counts_for_its_objects_and_its_successor() -> None:
    simulation = served()
    lead(simulation, SECOND)
    simulation.delete(*DOMAIN)
    assert writes(simulation) == [], "the first creates the successor"
    simulation.put(domain())
    assert [entry for entry in writes(simulation) if entry[0] != "put"] == []
    assert "claimed by" in served_by_another(simulation.world)


def test_two_that_start_together_never_both_hold_the_claim() -> None:
    simulation = Simulation(*OBJECTS)
    simulation.store.installation = SECOND

    def faster(verb: str, kind: str, name: str) -> None:
        simulation.kube.before_write = lambda *_: None
        set_claim(simulation, FIRST)

    simulation.kube.before_write = faster
    simulation.advance(60)
    assert claim(simulation) == FIRST.to_kubernetes()
    assert {entry[:2] for entry in simulation.kube.log if entry[0] != "put"} == {
        ("status", "CacheDomain"),
        ("create", "Event"),
    }


def test_definitions_of_an_earlier_version_are_reported_and_not_written_to_without_end() -> None:
    class Earlier(MemoryKube):
        async def patch_status(self, *request: Any) -> Any:
            resource, namespace, name, status, version = request
            return await super().patch_status(resource, namespace, name, {**status, "servedBy": None}, version)

    simulation = Simulation(*OBJECTS)
    simulation.store.installation = FIRST
    simulation.kube.__class__ = Earlier
    simulation.advance(60)
    (stalled,) = (one for one in simulation.status(*DOMAIN)["conditions"] if one["type"] == "Stalled")
    assert "upgrade the CustomResourceDefinitions" in stalled["message"]
    assert len(simulation.kube.log) < 40


def test_an_open_erasure_is_left_alone_once_another_serves_its_namespace() -> None:
    made = world()
    made.server.problem = "nothing listens"

    async def begin(w: World) -> None:
        w.sim.delete("TenantCachePolicy", "acme")
        await acked_until(w, lambda: phase(w.sim) == "Erasing")

    async def count(w: World) -> None:
        assert w.board is not None
        opened.append(w.board.open)

    opened: list[int] = []
    run(begin, made)
    made.sim.erase = lambda *_: None
    set_claim(made.sim, FIRST)
    for installation in (FIRST, SECOND):
        made.sim.restart()
        made.sim.store.installation = installation
        run(count, made)
    assert opened == [1, 0]
    assert len(made.kept()) == 1, "its record stays"


def test_a_chain_of_receipts_is_not_reported_in_a_namespace_of_another() -> None:
    simulation = served()
    domain_id = simulation.status(*DOMAIN)["domainID"]
    chain = ChainState(domain_id, NAMESPACE, [Link(Head(domain_id, NAMESPACE, 1, None, "0" * 64), 1, (), {}, b"")])
    lead(simulation, SECOND)
    assert finish(record_chain(simulation.kube, simulation.store, chain)) is None
    simulation.store.installation = FIRST
    assert finish(record_chain(simulation.kube, simulation.store, chain)) is not None


async def identity(kube: MemoryKube, namespace: str) -> str:
    store = SecretStore(kube, namespace, secrets.token_bytes, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    await store.open()
    return store.installation_uid


async def test_an_installation_keeps_its_id_over_processes_and_backups_and_shares_it_with_no_other_namespace() -> None:
    kube = MemoryKube()
    first = await identity(kube, "ops")
    assert await identity(kube, "ops") == first
    backup = kube.objects["Secret", "ops", AUTHORITY_SECRET]
    kube.remove("Secret", "ops", AUTHORITY_SECRET)
    bare = {name: value for name, value in backup["metadata"].items() if name not in ("uid", "resourceVersion")}
    await kube.create(SECRET, "ops", {**backup, "metadata": bare})
    assert kube.objects["Secret", "ops", AUTHORITY_SECRET]["metadata"]["uid"] != backup["metadata"]["uid"]
    assert await identity(kube, "ops") == first
    await kube.create(SECRET, "copied", {**backup, "metadata": {**bare, "namespace": "copied"}})
    assert await identity(kube, "copied") != first


async def test_an_authority_of_an_earlier_version_identifies_by_its_uid() -> None:
    kube = MemoryKube()
    await identity(kube, "ops")
    raw = kube.objects["Secret", "ops", AUTHORITY_SECRET]
    kube.put({**raw, "metadata": {**raw["metadata"], "annotations": {}}})
    assert await identity(kube, "ops") == await identity(kube, "ops") != ""

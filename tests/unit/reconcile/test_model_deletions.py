"""Deletion of a CachedModel ends its Deployment and its bundle, whatever became of their owner references."""

from __future__ import annotations

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.plan.kinds.model_deletion import FINALIZER
from tests.support.objects import NAMESPACE
from tests.support.worlds import Simulation
from tests.unit.reconcile.test_foreign_objects import MODEL, OBJECTS, foreign, live
from tests.unit.reconcile.test_taking_back import orphaned, settled

SERVING = (("Deployment", "kvs-tiny"), ("Secret", "kvs-tiny-bundle"), ("Secret", "kvs-tiny-bundle-0a"))


def present(simulation: Simulation) -> list[tuple[str, str]]:
    return [slot for slot in (MODEL, *SERVING) if live(simulation, *slot) is not None]


def orphan(simulation: Simulation) -> None:
    """Take every owner reference away, as an orphan deletion does, before any event arrives."""
    for (kind, _, _), raw in list(simulation.kube.objects.items()):
        if kind != "Pod" and raw["metadata"].get("ownerReferences"):
            simulation.kube.put(orphaned(raw))


def test_the_finalizer_precedes_all_that_serves() -> None:
    simulation = Simulation(*OBJECTS)
    simulation.come_to_rest()
    written = simulation.kube.log
    assert written.index(("finalizers", *MODEL)) < written.index(("apply", "Deployment", "kvs-tiny"))
    assert live(simulation, *MODEL)["metadata"]["finalizers"] == [FINALIZER]


def test_a_deleted_model_takes_what_serves_it_along() -> None:
    simulation = settled()
    assert present(simulation) == [MODEL, *SERVING]
    simulation.delete(*MODEL)
    assert present(simulation) == [MODEL, *SERVING], "the object waits for the operator"
    simulation.advance(1)
    assert present(simulation) == []


@pytest.mark.parametrize("restarted", [False, True])
def test_an_orphan_deletion_ends_what_serves(restarted: bool) -> None:
    simulation = settled()
    orphan(simulation)
    simulation.delete(*MODEL)
    if restarted:
        simulation.restart()
    simulation.advance(2)
    assert present(simulation) == []


def test_an_orphan_ends_although_the_tiers_of_its_model_were_deleted_before() -> None:
    simulation = settled()
    for kind, _, name in list(simulation.kube.objects):
        if kind == "CacheTier":
            simulation.delete(kind, name)
    simulation.advance(2)
    orphan(simulation)
    simulation.delete(*MODEL)
    simulation.advance(2)
    assert present(simulation) == []


def test_a_deployment_of_others_is_left_alone() -> None:
    simulation = settled()
    simulation.kube.remove("Deployment", NAMESPACE, "kvs-tiny")
    simulation.kube.put(foreign("Deployment", "kvs-tiny"))
    before = live(simulation, "Deployment", "kvs-tiny")
    simulation.delete(*MODEL)
    simulation.advance(5)
    assert live(simulation, *MODEL) is None
    assert live(simulation, "Deployment", "kvs-tiny") == before


def test_what_does_not_exist_is_done() -> None:
    simulation = settled()
    for kind, name in SERVING:
        simulation.kube.remove(kind, NAMESPACE, name)
    simulation.delete(*MODEL)
    simulation.advance(1)
    assert live(simulation, *MODEL) is None


def test_a_model_that_never_had_a_domain_goes() -> None:
    simulation = Simulation(OBJECTS[2])
    simulation.kube.before_write = refuse_with("create", "CacheDomain")
    simulation.advance(5)
    simulation.delete(*MODEL)
    simulation.advance(5)
    assert live(simulation, *MODEL) is None


def refuse_with(verb: str, kind: str):  # type: ignore[no-untyped-def]
    def refuse(written: str, written_kind: str, name: str) -> None:
        if (written, written_kind) == (verb, kind):
            raise KubeError(403, "Forbidden", "no RoleBinding allows it")

    return refuse


def test_a_namespace_that_lost_the_operators_rights_does_not_wait() -> None:
    simulation = settled()
    simulation.kube.api.ending.add(NAMESPACE)
    simulation.kube.before_write = refuse_with("delete", "Deployment")
    simulation.delete(*MODEL)
    simulation.advance(2)
    assert live(simulation, *MODEL) is None


def test_a_refused_deletion_keeps_the_model_which_reports_it() -> None:
    simulation = settled()
    simulation.kube.before_write = refuse_with("delete", "Deployment")
    simulation.delete(*MODEL)
    simulation.advance(30)
    assert simulation.condition(*MODEL, "Ready") == ("False", "ChildRefused")
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(120)
    assert present(simulation) == []


def test_a_deleted_model_that_cannot_be_read_is_released() -> None:
    simulation = settled()
    raw = live(simulation, *MODEL)
    raw = {
        **raw,
        "spec": {**raw["spec"], "unknown": 1},
        "metadata": {**raw["metadata"], "finalizers": ["a.io/b", FINALIZER]},
    }
    simulation.put(raw)
    simulation.delete(*MODEL)
    simulation.restart()
    simulation.advance(2)
    assert live(simulation, *MODEL)["metadata"]["finalizers"] == ["a.io/b"]


def test_finalizers_of_others_stay() -> None:
    simulation = settled()
    raw = live(simulation, *MODEL)
    simulation.put({**raw, "metadata": {**raw["metadata"], "finalizers": [FINALIZER, "a.io/b"]}})
    simulation.delete(*MODEL)
    simulation.advance(2)
    assert live(simulation, *MODEL)["metadata"]["finalizers"] == ["a.io/b"]
    assert [slot for slot in SERVING if live(simulation, *slot)] == []

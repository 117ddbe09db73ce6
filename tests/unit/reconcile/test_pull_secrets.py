"""Pull secrets of a namespace's default account reach the account of a model's pods."""

from __future__ import annotations

from tests.support.objects import NAMESPACE, Raw, cpu_tier, model
from tests.support.worlds import Simulation
from tests.unit.reconcile.test_foreign_objects import live
from tests.unit.reconcile.test_taking_back import orphaned

ACCOUNT = ("ServiceAccount", "kvs-tiny")


def default_account(*secrets: str) -> Raw:
    about = {"name": "default", "namespace": NAMESPACE}
    named = [{"name": secret} for secret in secrets]
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about, "imagePullSecrets": named}


def test_an_account_has_the_pull_secrets_of_the_default_one_and_nothing_is_written_at_rest() -> None:
    simulation = Simulation(default_account("registry"), cpu_tier(), model(tiers=("cpu",)))
    simulation.come_to_rest()
    assert live(simulation, *ACCOUNT)["imagePullSecrets"] == [{"name": "registry"}]
    writes = simulation.kube.writes
    simulation.advance(180)
    simulation.restart()
    simulation.advance(20)
    assert simulation.kube.writes == writes, "something is written at rest"


def test_an_account_that_is_made_again_follows_the_default_one() -> None:
    simulation = Simulation(default_account("registry"), cpu_tier(), model(tiers=("cpu",)))
    simulation.come_to_rest()
    simulation.put(default_account("other", "third"))
    simulation.delete(*ACCOUNT)
    simulation.advance(5)
    assert live(simulation, *ACCOUNT)["imagePullSecrets"] == [{"name": "other"}, {"name": "third"}]


def test_such_an_account_that_loses_its_owner_is_taken_back() -> None:
    simulation = Simulation(default_account("registry"), cpu_tier(), model(tiers=("cpu",)))
    simulation.come_to_rest()
    before = live(simulation, *ACCOUNT)
    simulation.put(orphaned(before))
    simulation.advance(2)
    assert live(simulation, *ACCOUNT)["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]
    assert live(simulation, *ACCOUNT)["imagePullSecrets"] == [{"name": "registry"}]


def test_without_a_default_account_or_its_pull_secrets_there_are_none() -> None:
    for objects in ((), (default_account(),)):
        simulation = Simulation(*objects, cpu_tier(), model(tiers=("cpu",)))
        simulation.come_to_rest()
        assert "imagePullSecrets" not in live(simulation, *ACCOUNT)

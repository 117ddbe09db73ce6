"""Decisions about guarantees on their way to the API server: other plans know of them, and the log has them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import REGISTRY

from kvstrata.clients.kube import KubeError
from kvstrata.contract.messages.audit import Action, Event
from kvstrata.model.refs import Key
from tests.support.audit import lines
from tests.support.objects import NAMESPACE, Raw, cpu_tier, domain, model, pod, policy
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
OWN = Key(TCP, NAMESPACE, "acme-policy")


def tiers(guaranteed: str) -> list[Raw]:
    return [{"tier": "cpu", "guaranteed": guaranteed}]


@pytest.fixture
def simulation() -> Simulation:
    made = Simulation(domain(), cpu_tier(capacityPerPod="100Mi"), model(tiers=("cpu",)), pod("pod-0"))
    made.come_to_rest()
    return made


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("kvstrata_admissions_total", {"kind": TCP, "outcome": outcome}) or 0.0


def test_what_a_status_will_say_is_known_to_other_plans_while_it_is_written(simulation: Simulation) -> None:
    seen: list[dict[Key, Any]] = []
    granting = simulation.store.domain(NAMESPACE).granting
    simulation.kube.before_write = lambda verb, kind, name: seen.append(dict(granting)) if kind == TCP else None
    simulation.put(policy("acme", name="acme-policy", budgets=tiers("40Mi")))
    simulation.come_to_rest()
    assert {OWN: {"cpu": 40 << 20}} in seen
    assert granting == {}


def test_what_could_not_be_written_is_free_for_others_again(simulation: Simulation) -> None:
    def refuse(verb: str, kind: str, name: str) -> None:
        if kind == TCP:
            raise KubeError(500, "InternalError", "not now")

    simulation.kube.before_write = refuse
    simulation.put(policy("acme", name="acme-policy", budgets=tiers("40Mi")))
    simulation.step(OWN)
    assert simulation.store.domain(NAMESPACE).granting == {}


def test_each_decision_is_logged_and_counted_once_and_names_no_tenant(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    before = {outcome: counted(outcome) for outcome in ("admitted", "denied", "withdrawn", "released")}
    simulation.put(policy("acme", name="acme-policy", budgets=tiers("40Mi")))
    simulation.advance(2)
    simulation.put(policy("globex", name="other-policy", budgets=tiers("60Mi")))
    simulation.come_to_rest()
    simulation.edit(TCP, "acme-policy", budgets=tiers("20Mi"))
    simulation.come_to_rest()
    simulation.edit("CacheTier", "cpu", capacityPerPod="70Mi")
    simulation.come_to_rest()
    told = [line for line in lines(caplog) if line.action.event in (Event.ADMISSION, Event.DENIAL)]
    assert [(line.object, line.action, line.bytes) for line in told] == [
        (f"{TCP}/acme-policy", Action.GUARANTEE_ADMITTED, 40 << 20),
        (f"{TCP}/other-policy", Action.GUARANTEE_DENIED, None),
        (f"{TCP}/acme-policy", Action.GUARANTEE_RELEASED, 20 << 20),
        (f"{TCP}/other-policy", Action.GUARANTEE_ADMITTED, 60 << 20),
        (f"{TCP}/other-policy", Action.GUARANTEE_WITHDRAWN, 0),
        (f"{TCP}/other-policy", Action.GUARANTEE_DENIED, None),
    ]
    assert told[1].reason == "InsufficientCapacity"
    assert {(line.namespace, line.tenant) for line in told} == {(NAMESPACE, None)}
    after = {outcome: counted(outcome) - before[outcome] for outcome in before}
    assert after == {"admitted": 2, "denied": 2, "withdrawn": 1, "released": 1}

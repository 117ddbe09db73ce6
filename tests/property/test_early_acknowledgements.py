"""Pods acknowledge a commit before the API server's answer to it reaches the operator; statuses still follow."""

from __future__ import annotations

import base64

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Root
from kvstrata.objects import names
from tests.support.objects import NAMESPACE
from tests.support.worlds import Simulation

from .scenarios import SCENARIOS, prepared


def acknowledge_early(simulation: Simulation) -> None:
    """Let every pod acknowledge a root as soon as the API server has it."""

    def hook(verb: str, kind: str, name: str) -> None:
        for model in simulation.world.models:
            stored = simulation.kube.objects.get((kind, NAMESPACE, name))
            if (kind, name) == ("Secret", names.bundle_root(model)) and stored is not None:
                data = stored.get("data") or {}
                root = Root.decode(base64.b64decode(data[ROOT_DATA_KEY]))
                for pod in simulation.world.live_pods(model):
                    simulation.ack(pod.name, root.revision)

    simulation.kube.after_write = hook


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_left_to_write_once_every_pod_has_acknowledged(name: str) -> None:
    scenario = SCENARIOS[name]
    simulation = prepared(scenario)
    acknowledge_early(simulation)
    for step in scenario.steps:
        step(simulation)
        simulation.advance(8)
        assert simulation.unsettled() == {}

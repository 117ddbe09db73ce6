"""Worlds at rest in which something is invalidated, and how far that is."""

from __future__ import annotations

from typing import Any

from kvstrata.model.refs import Key
from tests.support.objects import NAMESPACE, cpu_tier, domain, model, pod
from tests.support.worlds import Simulation

KIND = "CacheInvalidation"
FENCE_S = 60
"""staleAfter of these worlds."""

END_S = FENCE_S + 30
"""staleAfter + maxRequestDuration."""


def at_rest(*objects: Any, pods: int = 2, **domain_spec: Any) -> Simulation:
    spec = {"staleAfter": "1m", "drainTimeout": "10s", "maxRequestDuration": "30s", **domain_spec}
    simulation = Simulation(domain(**spec), cpu_tier(), model(tiers=("cpu",)), *objects)
    simulation.settle()
    simulation.put(*(pod(f"pod-{n}") for n in range(pods)))
    simulation.come_to_rest()
    return simulation


def phase(simulation: Simulation, name: str = "now") -> str:
    return str(simulation.status(KIND, name).get("phase", ""))


def phases(simulation: Simulation, name: str = "now") -> list[str]:
    """Every phase that a plan wrote, in order, each once."""
    written = [
        str(write.status["phase"])
        for _, made in simulation.plans
        for write in made.statuses
        if write.key == Key(KIND, NAMESPACE, name) and "phase" in write.status
    ]
    return list(dict.fromkeys(written))

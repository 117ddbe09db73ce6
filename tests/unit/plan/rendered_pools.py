"""A pool, and pods that make tokens of it and compute nothing."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.contract.messages.pools import WarmOutcome
from kvstrata.objects.pod.identity import render_id
from tests.support.objects import NAMESPACE, Raw, cpu_tier, model, pod, pool
from tests.support.worlds import Simulation

KIND = "PrefixPool"
TEXT = "You are a patient assistant who answers in one sentence."
OTHER = "You are an impatient assistant who answers in one word.."


def rendered_by(raw: Raw) -> str:
    return render_id(CachedModel.parse({**raw, "metadata": {**raw["metadata"], "uid": "u"}}))


def prefixes(*texts: str) -> list[Raw]:
    return [{"name": f"p{number}", "text": text} for number, text in enumerate(texts)]


def sourced(key: str = "text", form: str | None = None) -> list[Raw]:
    prefix: Raw = {"name": "p0", "configMapKeyRef": {"name": "sources", "key": key}}
    return [prefix | ({"format": form} if form else {})]


def world(*objects: Raw, pods: int = 2, **spec: Any) -> Simulation:
    """A model with pods of its newest template that compute nothing, and a pool."""
    tiny = model(tiers=("cpu",))
    made = [pod(f"pod-{number}", render_id=rendered_by(tiny)) for number in range(pods)]
    simulation = Simulation(cpu_tier(), tiny, *made, *objects, pool("manual", **{"prefixes": prefixes(TEXT)} | spec))
    simulation.renderer.outcome = WarmOutcome.ENGINE
    simulation.come_to_rest()
    return simulation


def status(simulation: Simulation) -> dict[str, Any]:
    return simulation.status(KIND, "manual")


def reason(simulation: Simulation, condition: str = "Stalled") -> tuple[str, str]:
    return simulation.condition(KIND, "manual", condition)


def message(simulation: Simulation) -> str:
    return str(next(c["message"] for c in status(simulation)["conditions"] if c["type"] == "Stalled"))


def status_writes(simulation: Simulation) -> int:
    return sum(entry == ("status", KIND, "manual") for entry in simulation.kube.log)


def publish(simulation: Simulation) -> None:
    """Write what says that readers read the content in force."""
    stored = simulation.kube.objects[(KIND, NAMESPACE, "manual")]
    simulation.put({**stored, "status": {**stored["status"], "published": True}})
    simulation.come_to_rest()

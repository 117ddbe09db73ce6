"""When pods are probed, what follows for IsolationVerified, and what a failure does until somebody acts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.probe import ENGINE, Probed, ProbedTier, ProbeOutcome
from kvstrata.model.probe import ProbeReport
from kvstrata.model.refs import Key
from kvstrata.plan.actions import ProbePod
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, policy
from tests.support.worlds import Simulation

MODEL = Key("CachedModel", NAMESPACE, "tiny")
GOOD = (ProbedTier("cpu", "CPU", 2, 2, 3, 0, 0, 1, 0), ProbedTier("", ENGINE, 2, 2, 1))


class Scene:
    """A model with two pods, whose probes answer as a test says."""

    def __init__(self, **spec: Any) -> None:
        self.simulation = Simulation(
            cpu_tier(), model(tiers=("cpu",), replicas=2, **spec), pod("pod-0"), pod("pod-1"),
            policy("acme"), policy("globex"),
        )  # fmt: skip
        self.simulation.come_to_rest()

    def asked(self) -> list[str]:
        """Whom a plan asks now."""
        return [question.pod.name for question in self.questions()]

    def questions(self) -> list[ProbePod]:
        self.simulation.isolation_questions.clear()
        self.simulation.step(MODEL)
        return list(self.simulation.isolation_questions)

    def answer(self, *pods: str, **said: Any) -> None:
        """Have pods answer what they are asked."""
        for question in self.questions():
            if question.pod.name in (pods or ("pod-0", "pod-1")):
                state = self.simulation.world.states[question.pod.uid].state
                answer: Any = None if said.get("silent") else Probed(
                    state.gate_boot, state.cache_boot, question.revision, 1,
                    **({"outcome": ProbeOutcome.ISOLATED, "scopes": 2, "looked": 1, "tiers": GOOD} | said),
                )  # fmt: skip
                self.report(question, answer)
        self.simulation.settle()

    def report(self, question: ProbePod, answer: Probed | None) -> None:
        domain, simulation = self.simulation.store.domain(NAMESPACE), self.simulation
        known = domain.probes.get(question.pod.uid)
        domain.probes[question.pod.uid] = ProbeReport.after(known, answer, question.keyspaces, simulation.now)
        simulation.queue.add(MODEL)

    def verdict(self) -> tuple[str, str]:
        return self.simulation.condition("CachedModel", "tiny", "IsolationVerified")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.simulation.status("CachedModel", "tiny").get("probe") or {}
        return found

    def message(self) -> str:
        conditions = self.simulation.status("CachedModel", "tiny")["conditions"]
        return str(next(one["message"] for one in conditions if one["type"] == "IsolationVerified"))

    def reuse(self) -> str:
        return self.simulation.bundle().root.rules.reuse


FOUND = {
    "outcome": ProbeOutcome.FOREIGN_HIT,
    "tiers": (replace(GOOD[0], foreign_hits=1), GOOD[1]),
    "culprits": ("Tenant/acme", "Tenant/globex"),
}


def test_isolation_is_verified_when_every_pod_showed_it_and_not_before() -> None:
    scene = Scene()
    assert scene.verdict() == ("Unknown", "NotProbed")
    assert scene.asked() == ["pod-0", "pod-1"]
    scene.answer("pod-0")
    assert scene.verdict() == ("Unknown", "NotProbed")
    assert "1 of 2 pods" in scene.message()
    scene.answer()
    assert scene.verdict() == ("True", "IsolationShown")
    assert "2 of 2 pods" in scene.message()
    assert "10 lookups that had to miss did, between 8 controls that hit, in Engine, cpu" in scene.message()
    assert {name: scene.status()[name] for name in ("pods", "lookups", "controls")} == {
        "pods": 2, "lookups": 10, "controls": 8,
    }  # fmt: skip


def test_pods_are_probed_again_when_the_interval_is_over_and_status_is_written_once_in_it() -> None:
    scene = Scene(probe={"interval": "10m"})
    scene.answer()
    told = scene.status()
    scene.simulation.advance(599)
    assert scene.asked() == []
    scene.simulation.advance(1)
    assert scene.asked() == ["pod-0", "pod-1"]
    scene.answer("pod-0")
    assert scene.status() == told
    scene.answer("pod-1")
    assert scene.status()["time"] > told["time"]


def test_a_new_epoch_is_probed_soon_and_not_each_by_itself() -> None:
    scene = Scene(probe={"interval": "1h"})
    scene.answer()
    scene.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    scene.simulation.come_to_rest()
    assert scene.asked() == []
    scene.simulation.advance(60)
    assert scene.asked() == ["pod-0", "pod-1"]
    scene.answer()
    scene.simulation.advance(60)
    assert scene.asked() == []
    assert scene.verdict() == ("True", "IsolationShown")


def test_a_pod_is_asked_under_the_newest_bundle_only() -> None:
    scene = Scene()
    scene.answer()
    scene.simulation.edit("TenantCachePolicy", "acme", cacheGeneration=1)
    scene.simulation.settle()
    scene.simulation.advance(600)
    assert scene.asked() == []
    scene.simulation.come_to_rest()
    assert scene.asked() == ["pod-0", "pod-1"]


def test_a_pod_whose_processes_started_anew_is_probed_anew() -> None:
    scene = Scene()
    scene.answer()
    simulation = scene.simulation
    told = simulation.acks[simulation.pod("pod-1").uid]
    simulation._report(simulation.pod("pod-1"), replace(told, cache_boot="another"))
    assert scene.asked() == ["pod-1"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"tiers": (replace(GOOD[0], control_hits=0), GOOD[1])}, "ControlMissed"),
        ({"tiers": (replace(GOOD[0], control_hits=0),), "outcome": ProbeOutcome.NO_CONTROL}, "ControlMissed"),
        ({"tiers": (), "outcome": ProbeOutcome.ONE_SCOPE}, "OneScope"),
        ({"tiers": (), "outcome": ProbeOutcome.NO_REUSE}, "ReuseOff"),
        ({"silent": True}, "NotProbed"),
        ({"tiers": (), "outcome": ProbeOutcome.MOVED}, "NotProbed"),
    ],
)
def test_what_is_not_shown_is_neither_true_nor_false(said: dict[str, Any], reason: str) -> None:
    scene = Scene()
    scene.answer("pod-0")
    scene.answer("pod-1", **said)
    assert scene.verdict() == ("Unknown", reason)
    assert scene.reuse() == "Prefix"


def test_what_was_shown_stands_while_a_pod_does_not_answer_and_not_for_ever() -> None:
    scene = Scene()
    scene.answer()
    for _ in range(3):
        scene.simulation.advance(300)
        scene.answer("pod-0")
        scene.answer("pod-1", silent=True)
    assert scene.verdict() == ("True", "IsolationShown")
    scene.simulation.advance(301)
    scene.answer("pod-0")
    scene.answer("pod-1", silent=True)
    assert scene.verdict() == ("Unknown", "ProbeUnanswered")


def test_without_reuse_nothing_is_probed_or_claimed() -> None:
    scene = Scene(reuse={"mode": "Disabled"})
    assert scene.asked() == []
    assert scene.verdict() == ("", "")


def test_a_model_whose_spec_wants_no_probes_is_not_probed_and_not_judged() -> None:
    scene = Scene(probe={"mode": "Never"})
    assert scene.asked() == []
    assert scene.verdict() == ("", "")


def test_a_failure_is_told_with_whose_blocks_were_found_by_whom_and_reuse_goes_on_if_so_declared() -> None:
    scene = Scene()
    scene.answer("pod-0")
    scene.answer("pod-1", **FOUND)
    assert scene.verdict() == ("False", "ForeignHit")
    assert scene.message().startswith("pod pod-1: blocks of Tenant/acme were found for Tenant/globex in cpu;")
    assert scene.reuse() == "Prefix"


def test_a_failure_stands_though_later_probes_find_nothing_and_the_operator_starts_anew() -> None:
    scene = Scene()
    scene.answer(**FOUND)
    told = scene.status()["failure"]
    scene.simulation.advance(600)
    scene.answer()
    assert scene.verdict() == ("False", "ForeignHit")
    scene.simulation.restart()
    scene.simulation.come_to_rest()
    assert scene.verdict() == ("False", "ForeignHit")
    assert scene.status()["failure"] == told


def test_with_fence_reuse_nothing_is_reused_after_a_failure_until_the_generation_is_raised() -> None:
    scene = Scene(probe={"onFailure": "FenceReuse"})
    scene.answer("pod-1", **FOUND)
    assert scene.reuse() == "Disabled"
    assert scene.verdict() == ("False", "ForeignHit")
    scene.simulation.come_to_rest()
    assert scene.asked() == []
    scene.simulation.restart()
    scene.simulation.come_to_rest()
    assert scene.reuse() == "Disabled"
    scene.simulation.edit("CachedModel", "tiny", cacheGeneration=1)
    scene.simulation.come_to_rest()
    scene.simulation.roll_out()
    scene.simulation.come_to_rest()
    assert scene.reuse() == "Prefix"
    scene.answer()
    assert scene.verdict() == ("True", "IsolationShown")
    assert scene.status()["failure"]["cacheGeneration"] == 0, "what was stays to be read"


def test_a_failure_of_a_later_generation_is_recorded_with_it_and_stands_until_the_next() -> None:
    scene = Scene(probe={"onFailure": "FenceReuse"}, cacheGeneration=2)
    scene.answer("pod-1", **FOUND)
    assert scene.verdict() == ("False", "ForeignHit")
    assert scene.status()["failure"]["cacheGeneration"] == 2
    scene.simulation.restart()
    scene.simulation.come_to_rest()
    assert scene.verdict() == ("False", "ForeignHit")
    assert scene.reuse() == "Disabled"
    scene.simulation.edit("CachedModel", "tiny", cacheGeneration=3)
    scene.simulation.come_to_rest()
    scene.answer()
    assert scene.verdict() == ("True", "IsolationShown")
    assert scene.reuse() == "Prefix"


def test_pods_of_the_generation_that_failed_do_not_fail_the_next_one() -> None:
    scene = Scene(probe={"onFailure": "FenceReuse"})
    scene.answer(**FOUND)
    scene.simulation.edit("CachedModel", "tiny", cacheGeneration=1)
    scene.simulation.settle()
    scene.simulation.advance(1)
    assert scene.status()["failure"]["cacheGeneration"] == 0
    assert scene.verdict()[0] == "Unknown"


def test_fencing_may_be_declared_after_the_failure() -> None:
    scene = Scene()
    scene.answer(**FOUND)
    scene.simulation.edit("CachedModel", "tiny", probe={"onFailure": "FenceReuse"})
    scene.simulation.come_to_rest()
    assert scene.reuse() == "Disabled"
    scene.simulation.edit("CachedModel", "tiny", probe={"onFailure": "Report"})
    scene.simulation.come_to_rest()
    assert scene.reuse() == "Prefix"

"""Guarantees under random histories: objects come, grow, shrink and go, tiers are resized, the operator dies.

Whatever a bundle is committed with fits into its tiers at that moment. The arithmetic itself has properties of its own
(`tests/unit/plan/test_waiting_line.py`); here it is that plans, writes, events and crashes keep to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kvstrata.api.conditions import ConditionType
from kvstrata.objects import names
from kvstrata.objects.sizing import stored_bytes
from tests.support.amounts import examples
from tests.support.objects import cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Killed, Simulation

from .normal import read_bundle

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
TCP, GROUP = "TenantCachePolicy", "TenantGroup"
MIB = 1 << 20
WHO = ("a", "b", "c", "d", "lab")

steps = st.lists(
    st.tuples(
        st.sampled_from(["declare", "declare", "declare", "declare", "delete", "resize", "kill"]),
        st.sampled_from(WHO),
        st.sampled_from(["cpu", "shared"]),
        st.integers(1, 8),
    ),
    min_size=2,
    max_size=9,
)


def start(seed: int) -> Simulation:
    simulation = Simulation(
        domain(), redis_tier(capacity="100Mi"), cpu_tier(capacityPerPod="100Mi"), pod("pod-0"), pod("pod-1", "other"),
        model(tiers=("cpu", "shared")), model("other", tiers=("cpu",)), policy("m", group="lab"),
        seed=seed, shuffle=True,
    )  # fmt: skip
    simulation.come_to_rest()
    return simulation


def declare(simulation: Simulation, name: str, tier: str, tens: int) -> None:
    tiers = [{"tier": tier, "guaranteed": f"{tens * 10}Mi"}]
    kind = GROUP if name == "lab" else TCP
    if name in (simulation.world.groups if name == "lab" else simulation.world.policies):
        simulation.edit(kind, name, tiers=tiers)
    else:
        with survived(simulation):
            simulation.advance(2)  # so that each has an age of its own
        simulation.put(group("lab", "m", budgets=tiers) if name == "lab" else policy(name, budgets=tiers))


@contextmanager
def survived(simulation: Simulation) -> Iterator[None]:
    """Start the operator anew if it was to be killed meanwhile, and was."""
    try:
        yield
    except Killed:
        simulation.restart()


def carry_out(simulation: Simulation, what: str, name: str, tier: str, tens: int) -> None:
    match what:
        case "declare":
            declare(simulation, name, tier, tens)
        case "delete" if name in simulation.world.policies:
            simulation.delete(TCP, name)
        case "resize":
            field = "capacity" if tier == "shared" else "capacityPerPod"
            simulation.edit("CacheTier", tier, **{field: f"{40 + tens * 10}Mi"})
        case "kill":
            simulation.kill_at(tens, after=bool(tens % 2))
        case _:
            pass


class Watcher:
    """Looks at every bundle after the plan that committed it."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.seen = len(simulation.kube.api.history)

    def look(self) -> None:
        """Check all commits since the last look, during which no tier was edited."""
        history = self.simulation.kube.api.history
        roots = {names.bundle_root(name): name for name in self.simulation.world.models}
        committed = {
            roots[raw["metadata"]["name"]] for _, raw in history[self.seen :] if raw["metadata"]["name"] in roots
        }
        self.seen = len(history)
        for name in committed:
            self.check(name)

    def check(self, model_name: str) -> None:
        """Assert that the bundle of a model guarantees no more than its tiers have."""
        found = read_bundle(self.simulation.kube.objects, model_name)
        assert found is not None
        by_scope = {
            (entry.keyspace, budget.tier): budget.guaranteed_bytes or 0
            for entry in found.entries.values()
            for budget in entry.budgets
        }
        for name, tier in self.simulation.world.tiers.items():
            total = sum(size for (_, where), size in by_scope.items() if where == name)
            assert total <= (stored_bytes(tier.spec) or 0), (model_name, name, by_scope)


@settings(max_examples=examples(25), phases=QUICK)
@given(steps, st.integers(0, 2**16))
@example([("resize", "b", "shared", 1), ("declare", "c", "cpu", 5), ("declare", "c", "shared", 7)], 0)
def test_no_bundle_ever_guarantees_more_than_its_tiers_have(history: list[Any], seed: int) -> None:
    simulation = start(seed)
    watcher = Watcher(simulation)
    for step in history:
        carry_out(simulation, *step)
        for _ in range(20):
            try:
                while simulation.queue._due and (key := simulation._take()) is not None:
                    simulation.step(key)
                    watcher.look()
                break
            except Killed:
                simulation.restart()
    simulation.kube.before_write = simulation.kube.after_write = lambda verb, kind, name: None
    simulation.come_to_rest()
    watcher.look()
    assert simulation.unsettled() == {}
    at_rest(simulation)
    writes = simulation.kube.writes
    simulation.restart()
    simulation.settle()
    assert simulation.kube.writes == writes


def at_rest(simulation: Simulation) -> None:
    """Assert that what is recorded fits, that bundles say it, and that whoever waits eldest has no room."""
    for name, tier in simulation.world.tiers.items():
        room = stored_bytes(tier.spec) or 0
        claims = [
            c for t, found in simulation.world.claims.tiers.items() if t == name for c in found.by_holder.values()
        ]
        recorded = sum(claim.recorded_bytes or 0 for claim in claims)
        assert recorded <= room
        waiting = sorted((c for c in claims if c.waits and c.declared_bytes <= room), key=lambda c: c.since)
        if waiting:
            first = waiting[0]
            assert recorded - (first.recorded_bytes or 0) + first.declared_bytes > room, "there is room for it"
        entries = simulation.bundle().entries
        for claim in claims:
            if claim.holder.kind == TCP and claim.holder.name in entries:
                told = sum(b.guaranteed_bytes or 0 for b in entries[claim.holder.name].budgets if b.tier == name)
                reserved = claim.recorded_bytes or 0
                # A spec that asks for more than all of a tier never is in force: the one before it is.
                stalled = simulation.world.policies[claim.holder.name].status.condition(ConditionType.STALLED)
                wrong = stalled is not None and stalled.status == "True"
                assert told == (reserved if wrong else min(reserved, claim.declared_bytes))

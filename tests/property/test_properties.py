"""What holds in every world: isolation, a fixed point, and independence from the order of events."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstrata.objects.applied import APPLIED
from tests.support.amounts import examples
from tests.support.objects import Raw, cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: a failing world is small as it is, and a smaller one takes minutes to find."""

TENANTS = [f"t{n}" for n in range(5)]
GROUPS = ["g0", "g1"]

policies = st.builds(
    lambda tenant, isolation, named, generation, suspended, tier: {
        "tenant": tenant,
        "isolation": isolation,
        **({"groupRef": {"name": named}} if isolation == "Group" else {}),
        **({"budgets": [{"tier": tier, "limit": "1Mi"}]} if isolation == "Isolated" and tier else {}),
        **({"cacheGeneration": generation} if generation and isolation == "Isolated" else {}),
        "suspend": suspended,
    },
    st.sampled_from(TENANTS),
    st.sampled_from(["Isolated", "Group", "Public"]),
    st.sampled_from(GROUPS),
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from([None, "cpu", "gone"]),
)
group_specs = st.lists(st.sampled_from(TENANTS), unique=True, max_size=5)


@st.composite
def worlds(draw: st.DrawFn) -> list[Raw]:
    specs = draw(st.lists(policies, max_size=7))
    members = draw(st.lists(group_specs, max_size=2))
    objects = [cpu_tier(), redis_tier(), model("m0", tiers=("cpu", "shared")), model("m1", tiers=("cpu",))]
    objects += [policy(**_named(spec, f"p{n}")) for n, spec in enumerate(specs)]
    objects += [group(name, *tenants) for name, tenants in zip(GROUPS, members, strict=False)]
    return objects


def _named(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return {"name": name, **spec}


def aged(raw: Raw) -> Raw:
    """Return the object with a creation time of its own: seniority may not depend on the order of arrival."""
    name = raw["metadata"]["name"]
    number = int(name[-1]) if raw["kind"] == "TenantCachePolicy" else 0
    created = {"creationTimestamp": f"2026-01-01T00:00:{number:02d}Z", "uid": f"{raw['kind']}-{name}"}
    return {**raw, "metadata": {**raw["metadata"], **created}}


def at_rest(objects: list[Raw], seed: int = 0, *, shuffle: bool = False) -> Simulation:
    simulation = Simulation(seed=seed, shuffle=shuffle)
    simulation.put(domain())
    for raw in objects:
        simulation.put(aged(raw))
        if shuffle and simulation.random.random() < 0.5:
            simulation.settle()
    simulation.put(pod("pod-0", "m0"), pod("pod-1", "m1"))
    simulation.come_to_rest()
    return simulation


def may_share(simulation: Simulation, one: str, other: str) -> bool:
    """Whether two tenants share by the specs alone: computed from scratch, not by the planner's code."""
    world = simulation.world

    def circle(tenant: str) -> tuple[str, str]:
        named = [p for p in world.policies.values() if p.spec.tenant == tenant]
        chosen = min(named, key=lambda p: p.name)
        if chosen.spec.isolation == "Public":
            return ("public", "")
        found = world.groups.get(chosen.spec.group_name or "")
        if found and tenant in found.spec.members:
            return ("group", found.name)
        return ("tenant", tenant)

    return circle(one) == circle(other)


@settings(max_examples=examples(40), phases=QUICK)
@given(worlds())
def test_no_tenant_gets_a_keyspace_of_another_unless_they_share(objects: list[Raw]) -> None:
    simulation = at_rest(objects)
    for name in ("m0", "m1"):
        entries = list(simulation.bundle(name).entries.values())
        for one in entries:
            for other in entries:
                same = one.keyspace == other.keyspace
                assert same == may_share(simulation, one.tenant, other.tenant), (one, other)


@settings(max_examples=examples(30), phases=QUICK)
@given(worlds())
def test_a_settled_world_asks_for_no_write_and_a_restart_writes_nothing(objects: list[Raw]) -> None:
    simulation = at_rest(objects)
    assert simulation.unsettled() == {}
    before = simulation.kube.writes
    simulation.restart()
    simulation.settle()
    assert simulation.kube.writes == before, simulation.kube.log[before - simulation.kube.writes :]


@settings(max_examples=examples(30), phases=QUICK)
@given(worlds(), st.integers(0, 2**16))
def test_the_order_of_events_and_of_work_does_not_matter(objects: list[Raw], seed: int) -> None:
    shuffled = objects[:]
    random.Random(seed).shuffle(shuffled)
    # Policies come in the order of their age: one that was in force before an older rival came stays so, rightly.
    by_age = iter(raw for raw in objects if raw["kind"] == "TenantCachePolicy")
    shuffled = [next(by_age) if raw["kind"] == "TenantCachePolicy" else raw for raw in shuffled]
    one, other = _structure(at_rest(objects)), _structure(at_rest(shuffled, seed, shuffle=True))
    assert {part: (one[part], other[part]) for part in one if one[part] != other[part]} == {}


@settings(max_examples=examples(20), phases=QUICK)
@given(worlds(), worlds())
def test_one_state_after_another_is_the_same_as_the_second_alone(first: list[Raw], second: list[Raw]) -> None:
    second = [raw for raw in second if "gone" not in str(raw)]  # an invalid spec leaves the first in force, rightly
    simulation = at_rest(first)
    kept = {(raw["kind"], raw["metadata"]["name"], raw["spec"].get("tenant")) for raw in second}
    for raw in first:
        if (raw["kind"], raw["metadata"]["name"], raw["spec"].get("tenant")) not in kept:
            if raw["kind"] == "TenantCachePolicy":
                simulation.edit(raw["kind"], raw["metadata"]["name"], deletionPolicy="Abandon")
            simulation.delete(raw["kind"], raw["metadata"]["name"])
    simulation.come_to_rest()
    for raw in second:
        simulation.put(aged(raw))
    simulation.come_to_rest()
    fresh = at_rest(second)
    for name in ("m0", "m1"):
        assert _circles(simulation, name) == _circles(fresh, name)
    assert simulation.unsettled() == {}


def _circles(simulation: Simulation, model_name: str) -> dict[str, tuple[Any, ...]]:
    """What a bundle says without its random parts: scopes instead of keyspaces."""
    return {
        tenant: (entry.scope, entry.suspended, entry.budgets)
        for tenant, entry in simulation.bundle(model_name).entries.items()
    }


def _structure(simulation: Simulation) -> dict[str, Any]:
    conditions = {
        f"{kind}/{name}": {
            c["type"]: (str(c["status"]), str(c["reason"])) for c in raw.get("status", {}).get("conditions", ())
        }
        for (kind, _, name), raw in simulation.kube.objects.items()
        if kind in ("TenantCachePolicy", "TenantGroup", "CachedModel", "CacheTier", "CacheDomain")
    }
    left_out = ("Event", "Pod", "Secret")
    children = sorted((kind, name) for kind, _, name in simulation.kube.objects if kind not in left_out)
    for (kind, _, _), raw in simulation.kube.objects.items():
        if kind == "Deployment":
            assert APPLIED in raw["metadata"]["annotations"]
    return {
        **{f"bundle {name}": _circles(simulation, name) for name in ("m0", "m1")},
        **conditions,
        "children": children,
    }

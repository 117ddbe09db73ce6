"""One spec after another leaves what the second alone would: no field of a child survives that nobody wants any more.

What is meant to persist is in `PERSISTS` and in `KEPT_SECRETS`, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.objects import Raw, cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

from .normal import differences, normal

PERSISTS = frozenset(
    {
        "rolls",  # an epoch is never taken back, so the count of them only grows
        "formerScopes",  # where a tenant may have written, as long as that epoch lives
        "stores",  # the same of servers
        "models",  # those that a group or a policy may ever have reached
        "generation",
        "observedGeneration",
        "enforcedGeneration",
        "uid",
    }
)
"""Fields that tell of the past, on purpose; epochs themselves are compared by whose they are."""
KEPT_SECRETS = frozenset({"Secret/kvs-shared-redis-tls", "Secret/kvs-shared-redis-auth"})
"""Keys and certificates are not deleted with the wish for them: servers that still run may need them."""

OTHERS: tuple[Raw, ...] = (
    domain(), cpu_tier(), cpu_tier("big", capacityPerPod="2Gi"), redis_tier(), model(tiers=("cpu", "shared")),
    group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"), policy("c"), pod("pod-0"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Two specs of one object, each other's successor."""

    one: Raw
    other: Raw


def _engine(**changes: Any) -> Raw:
    return {"image": "engine:1", "replicas": 1, **changes}


PAIRS: Mapping[str, Pair] = {
    "a model with and without template, arguments and resources": Pair(
        model(
            tiers=("cpu", "shared"),
            engine=_engine(
                args=["--max-num-seqs=4"],
                replicas=3,
                resources={"limits": {"cpu": "2", "memory": "4Gi"}},
                podTemplate={
                    "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
                    "spec": {
                        "nodeSelector": {"disk": "fast"},
                        "tolerations": [{"key": "gpu", "operator": "Exists"}],
                        "priorityClassName": "high",
                    },
                },
            ),
        ),
        model(tiers=("cpu", "shared")),
    ),
    "a model with other tiers": Pair(model(tiers=("shared",)), model(tiers=("big",))),
    "a model without reuse and without TLS": Pair(
        model(
            tiers=("cpu",),
            reuse={"mode": "Disabled"},
            gate={
                "authentication": {"apiKeys": {"secretRef": {"name": "keys"}}},
                "tls": {"mode": "Disabled"},
            },
        ),
        model(tiers=("cpu",)),
    ),
    "a Redis tier with resources, without TLS": Pair(
        redis_tier(
            redis={
                "managed": {"tls": {"mode": "Disabled"}, "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}},
            }
        ),
        redis_tier(capacity="128Mi", maxRetention="1h"),
    ),
    "a policy of every isolation": Pair(
        policy("c", budgets=[{"tier": "shared", "limit": "1Mi", "retention": "1h"}], suspend=True),
        policy("c", isolation="Public"),
    ),
    "a policy in and out of its group": Pair(policy("b"), policy("b", group="lab")),
    "a group with other members and budgets": Pair(
        group("lab", "a", budgets=[{"tier": "shared", "limit": "1Mi"}]), group("lab", "a", "b", sharing="PoolsOnly")
    ),
    "a domain with other settings": Pair(
        domain(staleAfter="1m", onStale="ServeStale", unknownTenants="Refuse"), domain()
    ),
}


def with_spec(subject: Raw) -> Simulation:
    simulation = Simulation()
    slot = (subject["kind"], subject["metadata"]["name"])
    simulation.put(*(subject if (raw["kind"], raw["metadata"]["name"]) == slot else raw for raw in OTHERS))
    simulation.come_to_rest()
    return simulation


def _comparable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _comparable(inner) for name, inner in value.items() if name not in PERSISTS}
    return [_comparable(item) for item in value] if isinstance(value, list) else value


def _state(simulation: Simulation) -> Mapping[str, Any]:
    return {part: _comparable(value) for part, value in normal(simulation).items() if part not in KEPT_SECRETS}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_one_spec_after_another_leaves_what_the_second_alone_would(name: str, turned: bool) -> None:
    pair = Pair(PAIRS[name].other, PAIRS[name].one) if turned else PAIRS[name]
    simulation = with_spec(pair.one)
    stored = simulation.kube.objects[(pair.one["kind"], "team", pair.one["metadata"]["name"])]
    simulation.put({**stored, "spec": pair.other["spec"]})
    simulation.come_to_rest()
    assert differences(_state(with_spec(pair.other)), _state(simulation)) == []
    assert simulation.unsettled() == {}

"""What a user may write and the API server will not have of a child ends Stalled, whatever status the refusal has."""

from __future__ import annotations

import pytest

from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.server import NAMESPACE, Server
from tests.support.objects import redis_tier

TWICE = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}] * 2
"""Two entries of one key, which server-side apply answers with status 500."""
NOT_A_NUMBER = [{"maxSkew": "much", "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]
NO_ACTION = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Perhaps"}]


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        pytest.param("twice", TWICE, id="two-entries-of-one-key"),
        pytest.param("no-number", NOT_A_NUMBER, id="a-field-of-another-type"),
        pytest.param("no-action", NO_ACTION, id="a-value-that-is-not-allowed"),
    ],
)
def test_constraints_that_the_api_server_refuses_stall_their_tier(
    server: Server, operator: OperatorProcess, name: str, spread: list[dict[str, object]]
) -> None:
    tier = redis_tier(name)
    tier["metadata"]["namespace"] = NAMESPACE
    tier["spec"]["redis"]["managed"]["podTemplate"] = {"topologySpreadConstraints": spread}
    server.apply(tier)
    server.wait("the tier to stall", lambda: server.condition("CacheTier", name, "Stalled") == ("True", "ChildRefused"))
    assert server.condition("CacheTier", name, "Ready") == ("False", "ChildRefused")
    server.kubectl("-n", NAMESPACE, "delete", "cachetier", name)
    assert operator.metric("kvstrata_reconcile_failures_total", reason="Bug") == 0

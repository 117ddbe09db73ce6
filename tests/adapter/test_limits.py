"""Every field of a budget reaches what tiers enforce."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvstrata.api.common import Budget
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.plan.bundle.compile import enforced
from kvstrata_sidecar.adapter.policy.limits import Bounds, SharedBounds, bounds_in

KEYSPACE = "0" * 32
DECLARED = {"guaranteed": "1Mi", "limit": "2Mi", "retention": "1h"}
SET = {"limit_bytes": 100, "guaranteed_bytes": 40, "retention_s": 60, "denied": True}


@pytest.mark.parametrize("name", [field.name for field in fields(EnforcedBudget) if field.name != "tier"])
def test_every_field_of_a_budget_changes_the_bounds_of_its_tier_alone(name: str) -> None:
    budgets = [EnforcedBudget("other"), EnforcedBudget("shared", **{name: SET[name]})]  # type: ignore[arg-type]
    assert getattr(bounds_in(budgets, "shared"), name) == SET[name]
    assert bounds_in(budgets, "other") == bounds_in((), "shared") == Bounds()


def test_a_shared_tier_enforces_the_limit_and_with_a_capacity_the_guarantee() -> None:
    assert Bounds().shared(None) is None
    assert Bounds(retention_s=60).shared(None) is None
    assert Bounds(100, 40).shared(None) == SharedBounds(100)
    assert Bounds(100, 40).shared(80) == SharedBounds(80, 40, 80)
    assert Bounds(100, 40).shared(500) == SharedBounds(100, 40, 500)
    assert Bounds().shared(500) == SharedBounds(500, 0, 500)


@pytest.mark.parametrize("name", sorted(Budget.model_fields.keys() - {"tier"}))
def test_every_field_that_users_set_is_a_bound_in_pods(name: str) -> None:
    declared = Budget.model_validate({"tier": "shared", name: DECLARED[name]})
    sent = CacheView("d", 1, 1, Rules(), {KEYSPACE: (enforced(declared),)}).encode()
    assert bounds_in(CacheView.decode(sent).keyspaces[KEYSPACE], "shared") != Bounds()

"""What has time waits while somebody erases from the cluster: deletions and looks count over one map of slots only.

What repairs after a loss goes on, and so does a move that was begun: an erasure waits for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.plan.redis.topology.steps import Rule, Step, StepReason
from kvstrata.plan.redis.topology.view import View


def stand_still(rules: Sequence[Rule]) -> Rule:
    """Return the rule that stands before these: while slots stand still it waits where they would do something."""

    def rule(view: View) -> Step | None:
        if not view.goal.erased_by:
            return None
        found = next((found for one in rules if (found := one(view)) is not None), None)
        if found is None or found.waits:
            return found
        first, *more = view.goal.erased_by
        whom = f"CacheInvalidation {first}" + (f" and {len(more)} more" if more else "")
        return Step(StepReason.STANDING_STILL, f"{found.message}: begins when {whom} has erased what is here")

    return rule

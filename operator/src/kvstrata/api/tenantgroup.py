"""TenantGroup: tenants that share blocks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvstrata.api.base import ENFORCED, READY, ApiModel, Column, KindInfo, Resource, Rule
from kvstrata.api.common import Budgets
from kvstrata.api.markers import set_list
from kvstrata.api.scalars import Count, Generation, TenantName
from kvstrata.api.status import EnforcedStatus


class Sharing(StrEnum):
    """Blocks that the members of a group share."""

    FULL = "Full"
    POOLS_ONLY = "PoolsOnly"


class TenantGroupSpec(ApiModel):
    """Tenants that share blocks, and their common budget."""

    members: Annotated[tuple[TenantName, ...], Field(max_length=1024), set_list()]
    """Tenants that may share. A tenant shares only when its own policy names this group, too."""

    sharing: Sharing = Sharing.FULL
    """Full: members reuse one another's blocks. PoolsOnly: members share only the PrefixPools that the group may read.
    Absent means Full."""

    budgets: Budgets = ()
    """Budgets of the group as a whole; with sharing Full only, because otherwise nothing is stored under the group."""

    cache_generation: Generation = 0
    """Raise it to make everything that this group has cached unreachable."""

    RULES = (
        Rule(
            cel="!has(self.sharing) || self.sharing != 'PoolsOnly' || !has(self.budgets) || size(self.budgets) == 0",
            message="with sharing PoolsOnly nothing is stored under the group: remove budgets, and give members "
            "budgets in their own policies",
            field_path=".budgets",
            holds=lambda group: group.sharing is not Sharing.POOLS_ONLY or not group.budgets,
        ),
    )


class TenantGroupStatus(EnforcedStatus):
    """Observed state of a TenantGroup."""

    joined: Count | None = None
    """Members whose policy names this group; with sharing PoolsOnly those that have a policy."""


class TenantGroup(Resource):
    """A TenantGroup lists tenants that may share blocks. It is a separate kind, so that the right to edit a policy is
    not the right to join a group. Shared blocks have the strictest classification of the members' policies, of which
    an absent one counts as Restricted, and the shortest retention that the group or a member's policy sets."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="TenantGroup",
        plural="tenantgroups",
        short_names=("tgroup",),
        columns=(
            Column("Joined", ".status.joined", "integer", "Members whose policy names this group"),
            Column("Used", ".status.summary.used"),
            Column("Limit", ".status.summary.limit"),
            ENFORCED,
            *READY,
            Column("Sharing", ".spec.sharing", priority=1),
            Column("Guaranteed", ".status.summary.guaranteed", priority=1),
            Column.of_condition("Admitted", "Admitted", priority=1),
            Column("Rolls", ".status.scope.rolls", "integer", priority=1),
        ),
    )

    spec: TenantGroupSpec
    status: TenantGroupStatus = TenantGroupStatus()

"""TenantGroup: tenants that share blocks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from kvstrata.api.base import AGE, ENFORCED_BY, READY, ApiModel, Column, KindInfo, Resource, Rule, condition_column
from kvstrata.api.common import Admission, Budget, Budgets, Count, ScopeStatus, Status, Usage
from kvstrata.api.markers import SetList
from kvstrata.api.scalars import Generation, ShortText, TenantName


class Sharing(StrEnum):
    """Blocks that the members of a group share."""

    FULL = "Full"
    POOLS_ONLY = "PoolsOnly"


class TenantGroupSpec(ApiModel):
    """Tenants that share blocks, and their common budget."""

    members: Annotated[tuple[TenantName, ...], Field(max_length=1024), SetList()]
    """Tenants that may share. A tenant shares only when its own policy names this group, too."""

    sharing: Sharing | None = None
    """Full: members reuse one another's blocks. PoolsOnly: members share only the PrefixPools that the group may read.
    Absent means Full."""

    budgets: Budgets = ()
    """Budgets of the group as a whole; with sharing Full only, because otherwise nothing is stored under the group."""

    cache_generation: Generation | None = None
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

    @property
    def effective_sharing(self) -> Sharing:
        """sharing, or its default."""
        return self.sharing or Sharing.FULL

    @property
    def effective_cache_generation(self) -> int:
        """cacheGeneration, 0 when absent."""
        return self.cache_generation or 0

    def budget(self, tier: str) -> Budget | None:
        """The budget on the named tier, or None."""
        return next((budget for budget in self.budgets if budget.tier == tier), None)


class TenantGroupStatus(Status):
    """Observed state of a TenantGroup."""

    scope: ScopeStatus | None = None
    """The group's scope and its epoch."""

    joined: Count | None = None
    """Members whose policy names this group; with sharing PoolsOnly those that have a policy."""

    enforced_by: ShortText | None = None
    """Serving pods that enforce this generation, out of all (`2/3`); `no pods` if none serves."""

    enforced_generation: Generation | None = None
    """The metadata.generation that every live pod has acknowledged."""

    digest: Annotated[str, StringConstraints(max_length=128)] | None = None
    """Digest of the compiled policy in force."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""

    usage: Usage | None = None
    """Usage of the scope."""

    admission: Admission | None = None
    """Admitted guarantees; absent if none was ever declared."""


class TenantGroup(Resource):
    """A TenantGroup lists tenants that may share blocks. It is a separate kind, so that the right to edit a policy is
    not the right to join a group. Shared blocks have the strictest classification of the members' policies; an absent
    one counts as Restricted. Retention is set by the group's own budgets."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="TenantGroup",
        plural="tenantgroups",
        short_names=("tgroup",),
        columns=(
            Column("Joined", ".status.joined", "integer", "Members whose policy names this group"),
            Column("Used", ".status.summary.used"),
            Column("Limit", ".status.summary.limit"),
            ENFORCED_BY,
            *READY,
            Column("Sharing", ".spec.sharing", priority=1),
            Column("Guaranteed", ".status.summary.guaranteed", priority=1),
            condition_column("Admitted", "Admitted", priority=1),
            Column("Rolls", ".status.scope.rolls", "integer", priority=1),
            AGE,
        ),
    )

    spec: TenantGroupSpec
    status: TenantGroupStatus = TenantGroupStatus()

"""TenantCachePolicy: isolation, budgets and retention of one tenant."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvstrata.api.base import ENFORCED, READY, ApiModel, Column, KindInfo, Resource, Rule, StatusModel, exactly_one_of
from kvstrata.api.common import Budgets, Classification, LabelSelector, ObjectRef, RateLimit
from kvstrata.api.markers import atomic_list, immutable, map_list, set_list
from kvstrata.api.scalars import Generation, ObjectName, ShortText, TenantName
from kvstrata.api.status import MAX_REACHED, EnforcedStatus
from kvstrata.contract.policy.keyspace import ScopeKind


class Isolation(StrEnum):
    """Scope in which a tenant shares blocks."""

    ISOLATED = "Isolated"
    GROUP = "Group"
    PUBLIC = "Public"


class DeletionPolicy(StrEnum):
    """What happens to cached data when its policy is deleted."""

    ERASE = "Erase"
    ABANDON = "Abandon"


class ModelsSelector(ApiModel):
    """The CachedModels that a policy applies to."""

    names: Annotated[tuple[ObjectName, ...], Field(min_length=1, max_length=256), set_list()] | None = None
    """Names of the CachedModels."""

    selector: LabelSelector | None = None
    """Selector of CachedModels by label."""

    RULES = (exactly_one_of(("names", "selector"), "models needs exactly one of names and selector"),)


class TenantCachePolicySpec(ApiModel):
    """Isolation, budgets and retention of one tenant."""

    tenant: Annotated[
        TenantName, immutable("tenant is immutable: create another TenantCachePolicy for the other tenant")
    ]
    """The caller identity, as the gate authenticates it."""

    isolation: Isolation
    """Isolated: no other tenant reuses this tenant's blocks. Group: the members of a TenantGroup share blocks. Public:
    all tenants with isolation Public share blocks."""

    group_ref: ObjectRef | None = None
    """The TenantGroup; with isolation Group only. The group must list the tenant."""

    models: ModelsSelector | None = None
    """CachedModels that this policy applies to. Absent means all of the namespace."""

    classification: Classification | None = None
    """Sensitivity of the tenant's data. Absent means Restricted, the strictest."""

    budgets: Budgets = ()
    """Budgets on tiers; a tier without an entry is used without guarantee and without limit. With isolation Group or
    Public only retention may be set, because shared scopes have budgets of their own; the shortest of all tenants of
    the scope applies to its blocks."""

    pools: Annotated[tuple[ObjectRef, ...], Field(max_length=64), map_list()] = ()
    """PrefixPools for the tenant to read. A pool must also list the tenant as a reader."""

    cache_generation: Generation = 0
    """Raise it to make everything that this tenant has cached unreachable; with isolation Isolated only, because others
    use shared scopes too."""

    deletion_policy: DeletionPolicy = DeletionPolicy.ERASE
    """Erase: deleting the policy also erases the tenant's blocks that it does not share, and the policy remains until a
    receipt records the result. Abandon: the blocks become unreachable and age out. Absent means Erase."""

    suspend: bool = False
    """Whether reuse is suspended for this tenant. Its requests are still answered. Absent means false."""

    rate_limit: RateLimit | None = None
    """Rate limits of the tenant on each replica. A limit that is absent is that of the CachedModel's gate."""

    RULES = (
        Rule(
            cel="self.isolation != 'Group' || has(self.groupRef)",
            message="groupRef is required with isolation Group",
            field_path=".groupRef",
            holds=lambda spec: spec.isolation is not Isolation.GROUP or spec.group_ref is not None,
        ),
        Rule(
            cel="self.isolation == 'Group' || !has(self.groupRef)",
            message="groupRef is only for isolation Group",
            field_path=".groupRef",
            holds=lambda spec: spec.isolation is Isolation.GROUP or spec.group_ref is None,
        ),
        Rule(
            cel="self.isolation == 'Isolated' || !has(self.budgets) || "
            "self.budgets.all(budget, !has(budget.guaranteed) && !has(budget.limit))",
            message="guaranteed and limit are only for isolation Isolated: shared scopes have budgets in the "
            "TenantGroup or in publicBudgets of the CacheDomain",
            field_path=".budgets",
            holds=lambda spec: (
                spec.isolation is Isolation.ISOLATED
                or all(budget.guaranteed is None and budget.limit is None for budget in spec.budgets)
            ),
        ),
        Rule(
            cel="self.isolation == 'Isolated' || !has(self.cacheGeneration)",
            message="cacheGeneration is only for isolation Isolated: raise that of the TenantGroup, or create a "
            "CacheInvalidation with sharedScopes: Roll",
            field_path=".cacheGeneration",
            holds=lambda spec: spec.isolation is Isolation.ISOLATED or "cache_generation" not in spec.model_fields_set,
        ),
    )

    @property
    def effective_classification(self) -> Classification:
        return self.classification or Classification.RESTRICTED

    @property
    def group_name(self) -> str | None:
        return self.group_ref.name if self.group_ref is not None else None

    @property
    def pool_names(self) -> tuple[str, ...]:
        return tuple(pool.name for pool in self.pools)

    def covers(self, model_name: str, model_labels: dict[str, str]) -> bool:
        if self.models is None:
            return True
        if self.models.names is not None:
            return model_name in self.models.names
        return self.models.selector is not None and self.models.selector.matches(model_labels)


class FormerScope(StatusModel):
    """A scope that this tenant may have written to earlier and whose epoch is still in use."""

    kind: ScopeKind
    """Kind of the scope."""

    name: ShortText
    """Name of the scope."""

    epoch: ShortText | None = None
    """The epoch at that time."""


class TenantCachePolicyStatus(EnforcedStatus):
    """Observed state of a TenantCachePolicy."""

    models: Annotated[tuple[ObjectName, ...], Field(max_length=MAX_REACHED), atomic_list()] | None = None
    """CachedModels with pods that may ever have had this policy; invalidations wait for no others. Absent for all:
    if spec.models ever was absent or selected more than 256, or selected none when the scope was drawn."""

    former_scopes: Annotated[tuple[FormerScope, ...], Field(max_length=64), atomic_list()] = ()
    """Other scopes that this tenant may have written to and whose epoch is still in use."""


class TenantCachePolicy(Resource):
    """A TenantCachePolicy sets for one tenant the scope in which it shares blocks, its budget and retention on each
    tier, and the treatment of its data when the policy is deleted."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="TenantCachePolicy",
        plural="tenantcachepolicies",
        short_names=("tcpol",),
        columns=(
            Column("Tenant", ".spec.tenant"),
            Column("Used", ".status.summary.used"),
            Column("Limit", ".status.summary.limit"),
            ENFORCED,
            *READY,
            Column("Isolation", ".spec.isolation", priority=1),
            Column("Guaranteed", ".status.summary.guaranteed", priority=1),
            Column.of_condition("Admitted", "Admitted", priority=1),
            Column("Epoch", ".status.scope.epoch", priority=1),
            Column("Rolls", ".status.scope.rolls", "integer", priority=1),
        ),
        selectable_fields=(".spec.tenant", ".spec.isolation"),
    )

    spec: TenantCachePolicySpec
    status: TenantCachePolicyStatus = TenantCachePolicyStatus()

"""CacheInvalidation: an immutable order to make cached data unreachable, or to erase it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from kvstrata.api.base import READY, ApiModel, Column, KindInfo, Resource, Rule, StatusModel, exactly_one_of
from kvstrata.api.common import ObjectRef, TierNames
from kvstrata.api.markers import atomic_list, between, map_list, set_list
from kvstrata.api.prefixpool import PrefixContent
from kvstrata.api.scalars import Count, Duration, ObjectName, Quantity, ShortText, TenantName, Text, Timestamp
from kvstrata.api.status import MAX_STORES, Hex, PodCount, Revision, Status, Store
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.vocabulary import Hbm, Mode

MAX_AWAITING = 1000
"""Most pods that status.awaiting names."""

MAX_SCOPES = 4096
"""Most scopes of one invalidation."""

MAX_ERASED_TIERS = 16
"""Most tiers in status.tiers."""


class PrefixScope(ApiModel):
    """Blocks of one prefix: its whole chunks, as the model's pods name them. During the erasure the scopes that may
    hold them reuse nothing. In pods all blocks of these scopes are erased; in shared tiers their other blocks stay."""

    model_ref: ObjectRef
    """The CachedModel."""

    content: PrefixContent
    """The prefix."""

    tenants: Annotated[tuple[TenantName, ...], Field(min_length=1, max_length=1024), set_list()] | None = None
    """Tenants whose blocks are erased. Absent means all."""


class InvalidationScope(ApiModel):
    """The data to invalidate: exactly one of these."""

    tenant: TenantName | None = None
    """Everything of one tenant."""

    group: ObjectName | None = None
    """Everything of one TenantGroup."""

    pool: ObjectName | None = None
    """Everything of one PrefixPool."""

    model: ObjectName | None = None
    """Everything of one CachedModel: the scopes of all tenants that use it, and its pools. A scope has one epoch for
    all models, so these tenants also lose their blocks of other models."""

    prefix: PrefixScope | None = None
    """One prefix, with mode Eager and hbm ResetEngine. PrefixPools are not changed."""

    all: Literal[True] | None = None
    """Everything of the namespace."""

    RULES = (
        exactly_one_of(
            ("tenant", "group", "pool", "model", "prefix", "all"),
            "scope needs exactly one of tenant, group, pool, model, prefix and all",
        ),
    )

    @property
    def named_tenants(self) -> tuple[str, ...]:
        """The named tenants: one, or those of a prefix; empty for all, or for another kind of scope."""
        if self.tenant is not None:
            return (self.tenant,)
        return (self.prefix.tenants or ()) if self.prefix is not None else ()

    @property
    def summary(self) -> str:
        """Short form for people, for example ``tenant/acme``."""
        form, member = next((form, member) for form, member in self if member is not None)
        name = self.prefix.model_ref.name if self.prefix is not None else member
        return form if self.all else f"{form}/{name}"


class SharedScopes(StrEnum):
    """What happens to scopes that a tenant shares with others."""

    ROLL = "Roll"
    EXCLUDE = "Exclude"


class CacheInvalidationSpec(ApiModel):
    """An order to invalidate. It cannot be changed."""

    scope: InvalidationScope
    """The data to invalidate."""

    shared_scopes: SharedScopes | None = None
    """Required for tenants that share or shared blocks. Roll: the whole shared scope is invalidated. Exclude: the
    shared scope stays, and the receipt names it as residue."""

    mode: Mode
    """Lazy: data becomes unreachable and ages out. Eager: data is also deleted, and the deletion is verified."""

    tiers: TierNames = ()
    """CacheTiers from which data is deleted; with mode Eager only. Absent means all."""

    hbm: Hbm = Hbm.ROLL_SCOPES
    """RollScopes: blocks in the engines' memory become unreachable. ResetEngine, with mode Eager only: the engines'
    prefix caches are emptied, for all tenants, and requests that run for more than two seconds are computed again.
    Absent means RollScopes."""

    reason: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Purpose of the invalidation; the receipt records it."""

    deadline: Annotated[Duration, between("10s", "168h")] | None = None
    """Time after its start at which an incomplete invalidation fails. Absent means never."""

    allow_residue: bool = False
    """Whether copies that the erasure cannot reach, for example on a lost node, may be left and named in the receipt.
    Absent means false."""

    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after its end at which this object is deleted. Absent means never. A tool that keeps applying this object
    would create and run it again."""

    RULES = (
        Rule(cel="self == oldSelf", message="an invalidation is immutable: create another CacheInvalidation"),
        Rule(
            cel="!has(self.sharedScopes) || has(self.scope.tenant) || has(self.scope.prefix)",
            message="sharedScopes is only for a scope that names a tenant or a prefix",
            field_path=".sharedScopes",
            holds=lambda spec: spec.shared_scopes is None or bool(spec.scope.tenant or spec.scope.prefix),
        ),
        Rule(
            cel="self.mode == 'Eager' || !has(self.tiers) || size(self.tiers) == 0",
            message="tiers are only for mode Eager, because Lazy deletes nothing",
            field_path=".tiers",
            holds=lambda spec: spec.mode is Mode.EAGER or not spec.tiers,
        ),
        Rule(
            cel="self.mode == 'Eager' || !has(self.allowResidue)",
            message="allowResidue is only for mode Eager, because Lazy deletes nothing",
            field_path=".allowResidue",
            holds=lambda spec: spec.mode is Mode.EAGER or "allow_residue" not in spec.model_fields_set,
        ),
        Rule(
            cel="self.mode == 'Eager' || !has(self.hbm) || self.hbm != 'ResetEngine'",
            message="hbm ResetEngine is only for mode Eager, which waits for the engines: set mode Eager, or hbm "
            "RollScopes",
            field_path=".hbm",
            holds=lambda spec: spec.mode is Mode.EAGER or spec.hbm is not Hbm.RESET_ENGINE,
        ),
        Rule(
            cel="!has(self.scope.prefix) || (self.mode == 'Eager' && has(self.hbm) && self.hbm == 'ResetEngine' && "
            "(!has(self.tiers) || size(self.tiers) == 0))",
            message="a prefix takes mode Eager and hbm ResetEngine, and no tiers, because its scopes stay in use and "
            "copies that are left would be found again: set both and remove tiers, or name the tenants or the model",
            field_path=".scope.prefix",
            holds=lambda spec: (
                spec.scope.prefix is None
                or (spec.mode is Mode.EAGER and spec.hbm is Hbm.RESET_ENGINE and not spec.tiers)
            ),
        ),
    )

    @property
    def deadline_s(self) -> int | None:
        return self.deadline.in_seconds if self.deadline is not None else None


class Phase(StrEnum):
    """Current step of an invalidation."""

    PENDING = "Pending"
    ROLLING = "Rolling"
    AWAITING_ACKS = "AwaitingAcks"
    REVOKING = "Revoking"
    WAITING_OUT_WRITES = "WaitingOutWrites"
    ERASING = "Erasing"
    VERIFYING = "Verifying"
    RECEIPTING = "Receipting"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        return self in (Phase.COMPLETE, Phase.FAILED)


class RolledScope(StatusModel):
    """A scope that gets or got a new epoch."""

    kind: ScopeKind
    """Kind of the scope."""

    name: ShortText
    """Name of the scope."""

    old_epoch: Annotated[str, StringConstraints(max_length=32)] | None = None
    """The epoch that the scope had; it is replaced only while the scope still has it."""

    new_epoch: Annotated[str, StringConstraints(max_length=32)] | None = None
    """The epoch that replaces the old one. Scopes of a prefix only pause, and get it only if the erasure is not
    proven."""


class TargetBundle(StatusModel):
    """The bundle revision that carries the invalidation to one model's pods."""

    model: ObjectName
    """The CachedModel."""

    revision: Revision
    """Pods that acknowledged this revision, or a later one, are done."""


class PodsProgress(StatusModel):
    """How many pods are done."""

    acked: PodCount = 0
    """Pods that acknowledged."""

    live: PodCount = 0
    """Pods that have to acknowledge, at the last count."""

    fenced: PodCount = 0
    """Unreachable pods that have fenced themselves."""


class AwaitedPod(StatusModel):
    """A pod whose acknowledgement is needed."""

    model: ObjectName
    """Its CachedModel."""

    pod: ShortText
    """Its name."""

    uid: ShortText
    """Its uid."""

    fenced_by: Timestamp | None = None
    """Latest time at which it fences itself if it is unreachable; absent if it never does."""


class TierErasure(StatusModel):
    """Deletion from one tier."""

    name: ShortText
    """Name of the CacheTier."""

    found: Count = 0
    """Keys that were found."""

    deleted: Count = 0
    """Keys that were deleted."""

    remaining: Count = 0
    """Keys that are left."""

    bytes: Count = 0
    """Bytes that were deleted."""


class CacheInvalidationStatus(Status):
    """Observed state of a CacheInvalidation."""

    phase: Phase | None = None
    """Current step of the invalidation."""

    start_time: Timestamp | None = None
    """When it started."""

    rolled_time: Timestamp | None = None
    """When every scope had its new epoch and every bundle carried it. Unreachable pods fence themselves staleAfter
    later."""

    completion_time: Timestamp | None = None
    """When it ended."""

    took: ShortText | None = None
    """Time from start to end."""

    scope_summary: ShortText | None = None
    """The scope in short form."""

    scopes: Annotated[tuple[RolledScope, ...], Field(max_length=MAX_SCOPES), atomic_list()] = ()
    """Scopes that get or got a new epoch."""

    stores: Annotated[tuple[Store, ...], Field(max_length=MAX_STORES), atomic_list()] = ()
    """Of an eager one: stores outside of pods that had blocks under the old epochs when it started."""

    targets: Annotated[tuple[TargetBundle, ...], Field(max_length=1024), map_list("model")] = ()
    """Bundles that carry the invalidation."""

    pods: PodsProgress | None = None
    """How many pods are done."""

    awaiting: Annotated[tuple[AwaitedPod, ...], Field(max_length=MAX_AWAITING), atomic_list()] = ()
    """Pods that had to acknowledge when every scope had its new epoch, at most 1000 of them."""

    keys: Count | None = None
    """Keys deleted on all tiers."""

    bytes: Quantity | None = None
    """Bytes deleted on all tiers."""

    tiers: Annotated[tuple[TierErasure, ...], Field(max_length=MAX_ERASED_TIERS), map_list()] = ()
    """Deletion from each tier."""

    receipt_digest: Hex | None = None
    """Digest of the signed receipt."""

    message: Text | None = None
    """Progress in one sentence."""


class CacheInvalidation(Resource):
    """A CacheInvalidation makes cached data unreachable or erases it, once. Its status shows separately which steps
    were done, acknowledged and verified."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="CacheInvalidation",
        plural="cacheinvalidations",
        short_names=("cinv",),
        columns=(
            Column("Scope", ".status.scopeSummary"),
            Column("Mode", ".spec.mode"),
            Column("Took", ".status.took"),
            *READY,
            Column("Phase", ".status.phase", priority=1),
            Column("Keys", ".status.keys", "integer", priority=1),
            Column("Bytes", ".status.summary.bytes", priority=1),
            Column("Acked", ".status.pods.acked", "integer", priority=1),
        ),
        selectable_fields=(".spec.mode",),
    )

    spec: CacheInvalidationSpec
    status: CacheInvalidationStatus = CacheInvalidationStatus()

    @property
    def finished(self) -> bool:
        return self.status.phase is not None and self.status.phase.finished

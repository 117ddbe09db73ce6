"""The order of an erasure in the world: an invalidation, or a deleted policy that can have none."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.tenantcachepolicy import TenantCachePolicy
from kvstrata.model.erasure.facts import Fact, Rolled
from kvstrata.model.erasure.record import ErasureRecord, Observed
from kvstrata.model.refs import Key
from kvstrata.model.world import World
from kvstrata.objects.labels import ERASES
from kvstrata.plan.erasure import gather, gather_deleted_policy
from kvstrata.plan.erasure.policy_deletion import ABANDON

Ordering = CacheInvalidation | TenantCachePolicy

REMOVED = "the object that ordered it was removed"
FAILED = "the object that ordered it had failed before it was known what was kept"


def begin(world: World, key: Key, found: Ordering | None, now: datetime) -> ErasureRecord | None:
    """Return the initial record, stored before anything is done; None while it is incomplete. It waits for missing
    data keys, so that they are revoked with their data, unless the erasure is abandoned."""
    record: ErasureRecord | None = None
    match found:
        case CacheInvalidation():
            record = gather.begin(world, found)
        case TenantCachePolicy():
            record = gather_deleted_policy.begin(world, found, now)
    waits = record is not None and gather.lacks_keys(world, record) and not _abandoned(world, key, found)
    return None if waits else record


def is_over(world: World, key: Key, found: Ordering | None) -> bool:
    return key not in world.unreadable if found is None else _has_finished(found)


def news(world: World, found: Ordering | None, record: ErasureRecord, now: datetime) -> Iterator[Fact]:
    if found is None:
        return
    if record.erasure.only(Rolled) is None and (rolled := _rolled(world, found, record, now)) is not None:
        # Acknowledgements are compared with it, so it comes first and alone.
        yield rolled
        return
    yield from gather.reports(world, record, found.status.awaiting if isinstance(found, CacheInvalidation) else (), now)
    yield from gather.servers_seen(world, record.erasure.order)
    yield from gather.tiers_lost(world, record.erasure, now)


def observed(
    world: World, key: Key, found: Ordering | None, record: ErasureRecord, elsewhere: int, now: datetime
) -> Observed:
    """`elsewhere` counts running Jobs of other erasures. The namespace is known to be going when its domain is gone and
    the order is deleted, too."""
    going = found is not None and found.metadata.deleting and world.domain is None
    return Observed(
        pods=gather.pods_at_hand(world, record.erasure),
        deletions_elsewhere=elsewhere,
        abandoned=_abandoned(world, key, found),
        unattended=now if going else None,
    )


def _abandoned(world: World, key: Key, found: Ordering | None) -> str:
    """Return why the erasure is abandoned: by an annotation of the order or of the deleted policy, or because the order
    was removed or has finished. Empty if it is not."""
    if found is None:
        return "" if key in world.unreadable else REMOVED
    policy = world.policies.get(world.policy_names.get(found.metadata.annotations.get(ERASES, ""), ""))
    told = [one.metadata.annotations.get(ABANDON, "").strip() for one in (found, policy) if one is not None]
    return next(filter(None, told), FAILED if _has_finished(found) else "")


def _rolled(world: World, found: Ordering, record: ErasureRecord, now: datetime) -> Rolled | None:
    if isinstance(found, CacheInvalidation):
        return gather.rolled(world, found, record)
    return gather_deleted_policy.rolled(world, record, now)


def _has_finished(found: Ordering) -> bool:
    return isinstance(found, CacheInvalidation) and found.finished

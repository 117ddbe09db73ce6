"""Scopes that pause: while one of their prefixes is erased, no pod reuses or stores anything under them.

They are treated as suspended: pods drop and erase their copies. Data on servers stays, except for the prefix, and is
used again afterwards. The invalidation's status lists the paused scopes, so that a new leader knows them before it
writes a bundle.
"""

from __future__ import annotations

from kvstrata.model.world import World
from kvstrata.plan.budgets.classification import Snapshot
from kvstrata.plan.scopes import Epoch


def paused_epochs(world: World) -> frozenset[str]:
    return world.memo.get(paused_epochs, world.namespace, (Snapshot(world),), lambda: _paused(world))


def pauses(world: World, epoch: Epoch | None) -> bool:
    return epoch is not None and epoch.value in paused_epochs(world)


def _paused(world: World) -> frozenset[str]:
    return frozenset(
        scope.old_epoch
        for invalidation in world.invalidations.values()
        if invalidation.spec.scope.prefix is not None and not invalidation.finished
        for scope in invalidation.status.scopes
        if scope.old_epoch
    )

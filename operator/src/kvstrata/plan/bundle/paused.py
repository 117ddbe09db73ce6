"""Scopes that pause: while one prefix of what they have is erased, nobody reuses or stores anything under them.

Their keyspaces are as suspended ones: pods let go, acknowledge that, and erase their own copies of them. What servers
have stays, but for the prefix, and is in use again when the erasure is over. Which scopes pause is in the status of the
invalidation, so whoever begins to lead knows it before it writes a bundle.
"""

from __future__ import annotations

from kvstrata.model.world import World
from kvstrata.plan.budgets.classification import Snapshot
from kvstrata.plan.scopes import Epoch


def paused_epochs(world: World) -> frozenset[str]:
    """Return the epochs that no pod may use until an erasure is over."""
    return world.memo.get((paused_epochs, world.namespace), (Snapshot(world),), lambda: _paused(world))


def pauses(world: World, epoch: Epoch | None) -> bool:
    """Whether a scope pauses in its epoch."""
    return epoch is not None and epoch.value in paused_epochs(world)


def _paused(world: World) -> frozenset[str]:
    return frozenset(
        scope.old_epoch
        for invalidation in world.invalidations.values()
        if invalidation.spec.scope.prefix is not None and not invalidation.finished
        for scope in invalidation.status.scopes
        if scope.old_epoch
    )

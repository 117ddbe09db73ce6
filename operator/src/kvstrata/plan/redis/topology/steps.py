"""What the rules of a managed cluster's topology may ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.model.redis.cluster import Command, SlotRange
from kvstrata.plan.redis.topology.view import View


class StepReason(StrEnum):
    """Why a step is taken or something is waited for; a condition's reason."""

    WAITING_FOR_PODS = "WaitingForPods"
    WAITING_FOR_SERVERS = "WaitingForServers"
    WAITING_FOR_FAILOVER = "WaitingForFailover"
    WAITING_FOR_GOSSIP = "WaitingForGossip"
    WAITING_FOR_REPLICAS = "WaitingForReplicas"
    TAKING_OVER = "TakingOver"
    FORGETTING = "Forgetting"
    MEETING = "Meeting"
    FORMING = "Forming"
    SLOTS_LOST = "SlotsLost"
    REPLICATING = "Replicating"
    REPAIRING_SLOTS = "RepairingSlots"
    REJOINING = "Rejoining"
    CHANGING_CAPACITY = "ChangingCapacity"
    MOVING_SLOTS = "MovingSlots"
    REMOVING_SHARD = "RemovingShard"
    FAILING_OVER = "FailingOver"
    ROLLING = "Rolling"
    REPLACING = "Replacing"
    STANDING_STILL = "StandingStill"


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Slots that are to go from one primary to another, each given by node id.

    `atomic` is by CLUSTER MIGRATESLOTS, otherwise key by key. With `drops` the slots go without what they hold;
    otherwise values over `movable_bytes` are dropped where keys are moved one by one. With the source as the target,
    the slots stay where they are, and what a move that cannot go on has left behind is cleared away.
    """

    source: str
    target: str
    slots: tuple[SlotRange, ...]
    atomic: bool
    drops: bool
    movable_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done now; nothing at all if it is only waited for something.

    A server gets its commands in their order, and the rest of them not when one fails: the next look finds what
    remains. `remove_pod` is the uid of a pod that is to be deleted, `lost` are slots whose values are gone with this
    step, `drained` are shards without slots, whose StatefulSets may go. `pause_s` is how long a look must wait, because
    the same step taken twice would undo what the first began.
    """

    reason: StepReason
    message: str
    commands: tuple[Command, ...] = ()
    remove_pod: str | None = None
    moves: tuple[MoveOrder, ...] = ()
    lost: tuple[SlotRange, ...] = ()
    drained: tuple[int, ...] = ()
    pause_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether there is nothing to do but to look again."""
        return not (self.commands or self.remove_pod or self.moves or self.drained)


Rule = Callable[[View], Step | None]
"""One concern: the step that it wants, or None if it has nothing to object to the cluster as it is."""

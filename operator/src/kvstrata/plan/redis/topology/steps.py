"""Steps of a managed cluster's topology."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.model.redis.cluster import Command, SlotRange
from kvstrata.plan.redis.topology.view import View


class StepReason(StrEnum):
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
    """Slots to move from one primary to another, by node id.

    `atomic` uses CLUSTER MIGRATESLOTS, otherwise keys move one by one. With `drops` slots move without data; otherwise
    single keys over `movable_bytes` are dropped. If source and target are equal, a broken move is cleaned up.
    """

    source: str
    target: str
    slots: tuple[SlotRange, ...]
    atomic: bool
    drops: bool
    movable_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now; nothing if it only waits.

    A server's commands run in order and stop at a failure; the next look finds the rest. `remove_pod` is a UID, `lost`
    are slots with values lost in this step, `drained` are shards with StatefulSets to remove. `pause_s` delays the next
    look, because repeating the step too soon would undo it.
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
        return not (self.commands or self.remove_pod or self.moves or self.drained)


Rule = Callable[[View], Step | None]

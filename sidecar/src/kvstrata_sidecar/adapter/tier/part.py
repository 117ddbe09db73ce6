"""What a worker carries out: one exchange with a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.tasks import Key, Task


class Carrier(Protocol):
    """What one worker reaches its tier through."""

    def renew(self) -> None:
        """Forget that what was under way was cut off: another part begins."""

    def abort(self, why: str = "") -> None:
        """Cut off what is under way, where that can be done; `why` blames whoever it waits for. From any thread."""

    def close(self) -> None:
        """Give everything back."""


CarrierT = TypeVar("CarrierT", contravariant=True)


@dataclass(slots=True)
class Gain:
    """What a part has achieved so far: indices of keys found, and the keys and sizes of blocks that were carried."""

    hits: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def carried(self, key: Key, size: int) -> None:
        """Add a block."""
        self.keys.append(key)
        self.sizes.append(size)


class Part(ABC, Generic[CarrierT]):
    """One exchange with a tier, on one keyspace's behalf. `task` is None for what LMCache does not wait for.

    `size` is how many bytes of LMCache's memory it keeps lent while it waits, `pools` are the pools' keyspaces that it
    reads.
    """

    task: Task | None
    keyspace: str | None
    urgent: bool
    size: int = 0
    pools: tuple[str, ...] = ()

    @abstractmethod
    def run(self, carrier: CarrierT, gain: Gain) -> None:
        """Do the exchange. Raises what its carrier raises; what `gain` has by then counts all the same."""

    def refused(self, refusal: Refusal) -> None:
        """Learn that the exchange is not allowed (any more)."""

    def over(self, error: Exception | None) -> None:
        """Learn that the part is over, for those that no task waits for."""


AnyPart = Part[Any]
"""A part of whichever tier."""

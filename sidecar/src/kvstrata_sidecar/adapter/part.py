"""What a worker carries out: one exchange with a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from .cluster_transport import ClusterTransport
from .enforcement import Refusal
from .tasks import Key, Task


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


class Part(ABC):
    """One exchange with a tier, all within one keyspace. `task` is None for what LMCache does not wait for.

    `size` is how many bytes of LMCache's memory it keeps lent while it waits.
    """

    task: Task | None
    keyspace: str | None
    urgent: bool
    size: int = 0

    @abstractmethod
    def run(self, transport: ClusterTransport, gain: Gain) -> None:
        """Do the exchange. Raises TransportError or ReplyError; what `gain` has by then counts all the same."""

    def refused(self, refusal: Refusal) -> None:  # noqa: B027  (to be overridden by those that count)
        """Learn that the exchange is not allowed (any more)."""

    def over(self, error: Exception | None) -> None:  # noqa: B027  (to be overridden by those without a task)
        """Learn that the part is over, for those that no task waits for."""

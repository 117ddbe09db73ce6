"""What a worker carries out: one exchange with a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from .cluster_transport import ClusterTransport
from .enforcement import Refusal
from .tasks import Key, Task


@dataclass(frozen=True, slots=True)
class Gain:
    """What a part achieved: indices of keys found, and the key and size of a block that was carried."""

    hits: tuple[int, ...] = ()
    key: Key = None
    size: int = 0


class Part(ABC):
    """One exchange with a tier, all within one keyspace. `task` is None for what LMCache does not wait for.

    `size` is how many bytes of LMCache's memory it keeps lent while it waits.
    """

    task: Task | None
    keyspace: str | None
    urgent: bool
    size: int = 0

    @abstractmethod
    def run(self, transport: ClusterTransport) -> Gain:
        """Do the exchange. Raises TransportError or ReplyError."""

    def refused(self, refusal: Refusal) -> None:  # noqa: B027  (to be overridden by those that count)
        """Learn that the exchange is not allowed (any more)."""

    def over(self, error: Exception | None) -> None:  # noqa: B027  (to be overridden by those without a task)
        """Learn that the part is over, for those that no task waits for."""

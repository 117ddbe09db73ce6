"""Values that a connection writes and reads in one pipeline, between LMCache's memory and a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.adapter.tier.sealer import Opening

Parts = Sequence[bytes | memoryview]


@dataclass(slots=True)
class Write:
    """A value for `key` that lives for `ttl_ms`, and the command sent right behind it.

    `parts` is called when the value is about to be sent, so that one staging buffer per worker suffices. `answer` is
    the result of `after` (True without one) or the error; None until a reply came.
    """

    key: bytes
    parts: Callable[[], Parts]
    ttl_ms: int
    after: Command | None = None
    answer: Any = None


class Read(ABC):
    """A value to read, and the decision whether it counts. Methods are called in this order."""

    key: bytes
    before: Sequence[Command]

    @abstractmethod
    def accept(self, answers: Sequence[Any]) -> bool:
        """Whether the value counts, given the replies to `before`."""

    @abstractmethod
    def open(self) -> Opening:
        """Return the destination of the value; called for one value at a time, when it arrives."""

    def take(self, opening: Opening) -> bool:
        """Whether the bytes read are the value; called when all of them are there."""
        return opening.finish()


class Accepted(Read):
    """A value that was accepted already; only its bytes are read."""

    before: Sequence[Command] = ()

    def __init__(self, read: Read) -> None:
        self.key = read.key
        self._read = read

    def accept(self, answers: Sequence[Any]) -> bool:  # noqa: ARG002
        return True

    def open(self) -> Opening:
        return self._read.open()

    def take(self, opening: Opening) -> bool:
        return self._read.take(opening)

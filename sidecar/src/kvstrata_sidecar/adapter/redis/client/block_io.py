"""Values on their way: what a connection writes and reads in one pipeline, each between LMCache's memory and a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.adapter.tier.encryption import Opening

Parts = Sequence[bytes | memoryview]


@dataclass(slots=True)
class Write:
    """A value for `key` that lives for `ttl_ms`, and the command that travels right behind it.

    `parts` is called when the value is about to be sent, and what it returns is sent before the next one's is called:
    so a worker needs one staging buffer, however many values are on their way. `answer` is what the reply to `after`
    says (True without one), or the error that tells why not; None as long as nothing came.
    """

    key: bytes
    parts: Callable[[], Parts]
    ttl_ms: int
    after: Command | None = None
    answer: Any = None


class Read(ABC):
    """A value that is asked for, along with what decides whether it counts. Its methods are called in this order."""

    key: bytes
    before: Sequence[Command]

    @abstractmethod
    def accept(self, answers: Sequence[Any]) -> bool:
        """Whether the value counts, by what the replies to `before` say."""

    @abstractmethod
    def open(self) -> Opening:
        """Return where the value goes; asked for one value at a time, when it comes."""

    def take(self, opening: Opening) -> bool:
        """Whether what was read is the value, now that all of its bytes are there."""
        return opening.finish()


class Accepted(Read):
    """A value about which all has been said but its bytes."""

    before: Sequence[Command] = ()

    def __init__(self, read: Read) -> None:
        self.key = read.key
        self._read = read

    def accept(self, answers: Sequence[Any]) -> bool:  # noqa: ARG002
        """Take it."""
        return True

    def open(self) -> Opening:
        """Return where the value goes."""
        return self._read.open()

    def take(self, opening: Opening) -> bool:
        """Whether what was read is the value."""
        return self._read.take(opening)

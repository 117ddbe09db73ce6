"""The exchanges that a tier makes: look up, load, store, delete, probe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .enforcement import Refusal
from .resp import Connection, ReplyError
from .tasks import Key, Task
from .workers import Gain, Part


class Counters:
    """Named counts of one tier, for status and metrics. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[name] += amount

    def refuse(self, refusal: Refusal, amount: int = 1) -> None:
        """Count blocks that were neither stored nor looked for, by reason."""
        with self._lock:
            self._counts["refused"] += amount
            self._counts[f"refused_{refusal}"] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)


@dataclass(slots=True, eq=False)
class LookupPart(Part):
    """Ask which of `names` are there; `indices` are their places in LMCache's request."""

    task: Task | None
    keyspace: str | None
    indices: Sequence[int]
    names: Sequence[bytes]
    counters: Counters
    urgent: bool = True

    def run(self, connection: Connection) -> Gain:
        """Look all of them up in one pipeline."""
        present = connection.exists(self.names)
        return Gain(hits=tuple(index for index, there in zip(self.indices, present, strict=True) if there))

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.counters.refuse(refusal, len(self.names))


@dataclass(slots=True, eq=False)
class LoadPart(Part):
    """Read one block into LMCache's buffer `view`."""

    task: Task | None
    keyspace: str | None
    index: int
    key: Key
    name: bytes
    view: memoryview
    counters: Counters
    urgent: bool = True

    def run(self, connection: Connection) -> Gain:
        """Read the block if it is there in full."""
        if not connection.get_into(self.name, self.view):
            self.counters.add("load_misses")
            return Gain()
        self.counters.add("loaded")
        self.counters.add("loaded_bytes", len(self.view))
        return Gain(hits=(self.index,), key=self.key, size=len(self.view))

    def refused(self, refusal: Refusal) -> None:
        """Count the block."""
        self.counters.refuse(refusal)


@dataclass(slots=True, eq=False)
class StorePart(Part):
    """Write one block from LMCache's buffer `view`.

    `ttl_ms` is asked at the last moment; 0 means not to store. `room` is told whether the tier had memory for it.
    """

    task: Task | None
    keyspace: str | None
    key: Key
    name: bytes
    view: memoryview
    ttl_ms: Callable[[str], int]
    room: Callable[[bool], None]
    counters: Counters
    urgent: bool = False

    def run(self, connection: Connection) -> Gain:
        """Write the block, unless its retention is nothing or the tier has no memory left."""
        ttl_ms = self.ttl_ms(self.keyspace or "")
        if ttl_ms <= 0:
            self.counters.refuse(Refusal.RETENTION)
            return Gain()
        try:
            connection.set(self.name, self.view, ttl_ms)
        except ReplyError as error:
            if error.code != "OOM":
                raise
            self.counters.refuse(Refusal.TIER_FULL)
            self.room(False)
            return Gain()
        self.room(True)
        self.counters.add("stored")
        self.counters.add("stored_bytes", len(self.view))
        return Gain(key=self.key, size=len(self.view))

    def refused(self, refusal: Refusal) -> None:
        """Count the block."""
        self.counters.refuse(refusal)


@dataclass(slots=True, eq=False)
class DeletePart(Part):
    """Delete blocks of one keyspace; `done` is set when it is over and `deleted` says which were there."""

    keyspace: str | None
    names: Sequence[bytes]
    counters: Counters
    task: Task | None = None
    urgent: bool = True
    deleted: list[bool] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, connection: Connection) -> Gain:
        """Delete them in one pipeline."""
        self.deleted = connection.unlink(self.names)
        return Gain()

    def refused(self, refusal: Refusal) -> None:
        """Count the blocks."""
        self.counters.refuse(refusal, len(self.names))

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        """Release whoever waits."""
        self.done.set()


@dataclass(slots=True, eq=False)
class ProbePart(Part):
    """See whether the server answers, on behalf of the breaker."""

    give_up_after_s: float
    report: Callable[[Exception | None], None]
    task: Task | None = None
    keyspace: str | None = None
    urgent: bool = True

    def run(self, connection: Connection) -> Gain:
        """Ping the server."""
        connection.ping(self.give_up_after_s)
        return Gain()

    def over(self, error: Exception | None) -> None:
        """Tell the breaker."""
        self.report(error)

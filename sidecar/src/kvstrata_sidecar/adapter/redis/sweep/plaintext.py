"""Takes a scope's buckets over for a tier that requires encryption.

Blocks keep their names when a tier's encryption is switched on, so its buckets may be full of plaintext, and pods that
started before the switch still store some. The first look of a pod that encrypts closes a bucket to plaintext, for as
long as any such pod renews that, and what is there goes in steps. `unseen` and `found` tell how far this is; a scope
that came into the policy after this process had begun counts only if plaintext was found in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix
from kvstrata_sidecar.adapter.redis.client.commands import (
    WRITE_WINDOW_MS,
    Transport,
    call,
    read_list,
    read_number,
    read_text,
    state_key,
)
from kvstrata_sidecar.adapter.redis.client.resp import Command, Reply

CLOSED_MS = 600_000
"""How long a bucket takes no plaintext after a pod that encrypts looked at it: an order of magnitude above the pause
between two sweeps. A tier that is to hold plaintext again waits for this."""

KEEP_MS = 7 * 86_400_000
ENTRIES_PER_CALL = 256
ROUNDS_PER_LOOK = 16
"""Calls in a row to one bucket; a large one is gone on with a tick later."""


@dataclass(frozen=True, slots=True)
class _Step:
    bucket: int
    since: int = 0
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    since: int
    cursor: int
    removed: int

    def after(self, step: _Step) -> _Step:
        return _Step(step.bucket, self.since, self.cursor)


EVERY_BUCKET = tuple(map(_Step, range(BUCKETS)))


class Plaintext:
    """Which of the policy's scopes may hold plaintext in one tier. Safe to share between threads.

    `count(name, amount, keyspace)` is told of blocks that went. `window_ms` is how long an uncommitted value lives.
    """

    def __init__(
        self,
        domain: str,
        count: Callable[[str, int, str], None],
        *,
        closed_ms: int = CLOSED_MS,
        window_ms: int = WRITE_WINDOW_MS,
    ) -> None:
        self._domain = domain
        self._count = count
        self._closed_ms = closed_ms
        self._window_ms = window_ms
        self._lock = threading.Lock()
        self._first: set[str] | None = None
        self._todo: dict[str, tuple[_Step, ...]] = {}
        self._known: set[str] = set()
        self._found: set[str] = set()

    def follow(self, keyspaces: Set[str]) -> None:
        """Note which scopes the policy has now."""
        with self._lock:
            if self._first is None:
                self._first = set(keyspaces)
            new, gone = keyspaces - self._known, self._known - keyspaces
            for keyspace in gone:
                self._todo.pop(keyspace, None)
            self._first -= gone
            self._found -= gone
            self._known = set(keyspaces)
            self._todo |= dict.fromkeys(new, EVERY_BUCKET)

    def todo(self) -> list[str]:
        """Return the scopes that are not known to be free of plaintext."""
        with self._lock:
            return list(self._todo)

    def unseen(self, keyspaces: Set[str]) -> int:
        """Return how many of the scopes that were in the policy when this process began are to be looked through."""
        with self._lock:
            return len(keyspaces) if self._first is None else len(self._first & self._todo.keys())

    @property
    def found(self) -> int:
        """In how many scopes plaintext was found that may not all be gone."""
        return len(self._found)

    def look(self, transport: Transport, keyspace: str) -> None:
        """Close a scope's buckets to plaintext for another while, and take out what there may be, some steps on."""
        with self._lock:
            steps = self._todo.get(keyspace, EVERY_BUCKET)
        waiting: list[_Step] = []
        for _ in range(ROUNDS_PER_LOOK):
            answers = transport.ask([self._command(keyspace, step) for step in steps])
            self._note_removed(keyspace, sum(answer.removed for answer in answers))
            after = [(answer.status, answer.after(step)) for step, answer in zip(steps, answers, strict=True)]
            waiting += [step for status, step in after if status == "wait"]
            steps = tuple(step for status, step in after if status == "more")
            if not steps:
                break
        left = (*steps, *waiting)
        with self._lock:
            self._todo.pop(keyspace, None)
            if not left:
                self._found.discard(keyspace)
            elif keyspace in self._known:
                self._todo[keyspace] = left  # behind all others

    def _command(self, keyspace: str, step: _Step) -> Command:
        state = state_key(bucket_prefix(self._domain, keyspace, step.bucket).encode())
        return call(
            "oust", state, self._closed_ms, KEEP_MS, self._window_ms, step.since, step.cursor, ENTRIES_PER_CALL,
            read=_read_answer,
        )  # fmt: skip

    def _note_removed(self, keyspace: str, removed: int) -> None:
        if removed:
            self._count("plaintext_removed", removed, keyspace)
            with self._lock:
                self._found.add(keyspace)


def _read_answer(reply: Reply) -> _Answer:
    status, since, cursor, removed = read_list(reply, 4)
    return _Answer(read_text(status), read_number(since), read_number(cursor), read_number(removed))

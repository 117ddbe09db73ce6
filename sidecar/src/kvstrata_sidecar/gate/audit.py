"""The audit log of the gate: requests served and refused by scope, keys and copies.

No request waits for a line. Requests are counted by action, scope and reason in a bounded table; about once a second a
thread writes a line for each row to standard output. While that thread is blocked, the table keeps counting; events
without room for a row are counted as dropped, and a line reports them as soon as writing works again.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from kvstrata.contract.messages.audit import NO_SCOPE, Action, Emitter, Happened, instant

TURN_S = 1.0
"""How long an event waits for its line."""

SERVED_EVERY_S = 60.0
"""How long served requests are counted together; there are many, and they are not urgent."""

IDS_OF_A_LINE = 8

Row = tuple[Action, str, str, str]
"""Action, reason, scope, and the tenant's name if it may be logged; empty for absent ones."""


@dataclass(slots=True)
class _Counted:
    """Requests of one row, and the ids of the first of them."""

    count: int = 0
    ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Batch:
    """Work for the thread: rows with counts and their start, other events, and the count of dropped ones."""

    at_s: float
    dropped: int
    rows: list[tuple[float, dict[Row, _Counted]]]
    others: list[Happened] = field(default_factory=list)


class Audit:
    """Takes events on the event loop's thread, in a few steps each. `write` takes a whole line, on another thread."""

    def __init__(
        self,
        emitter: Emitter,
        *,
        namespace: str,
        model: str,
        write: Callable[[bytes], None],
        now: Callable[[], float] = time.time,
        most_rows: int = 4096,
    ) -> None:
        self.events = 0
        """Events so far, including dropped ones."""
        self._now, self._most = now, most_rows
        self._emitter, self._write = emitter, write
        self._about = Happened(action=Action.EVENTS_DROPPED, namespace=namespace, model=model)
        self._dropped = 0
        self._rows: dict[Row, _Counted] = {}
        self._served: dict[Row, _Counted] = {}
        self._others: list[Happened] = []
        self._since_s = self._served_since_s = now()
        # Changed by the thread only, while it is not idle:
        self._idle = True
        self._lost = self._sequence = self._reported_dropped = 0
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_batches, name="audit", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Events that have no line and will have none."""
        return self._dropped + self._lost

    def request(
        self, action: Action, reason: str = "", scope: str = NO_SCOPE, tenant: str = "", request_id: str = ""
    ) -> None:
        self.events += 1
        table = self._served if action is Action.REQUESTS_SERVED else self._rows
        row = (action, reason, scope, tenant)
        if row in table or len(table) < self._most:
            counted = table.setdefault(row, _Counted())
            counted.count += 1
            if request_id and len(counted.ids) < IDS_OF_A_LINE:
                counted.ids.append(request_id)
        else:
            self._dropped += 1

    def record(self, action: Action, *, count: int, reason: str | None = None, revision: int | None = None) -> None:
        self.events += 1
        if len(self._others) < self._most:
            self._others.append(replace(self._about, action=action, count=count, reason=reason, revision=revision))
        else:
            self._dropped += 1

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self.turn()

    def turn(self, *, last: bool = False) -> None:
        """Hand the table to the thread if it is idle; `last` includes rows that could still wait."""
        if not self._idle:
            return
        at_s = self._now()
        batch = _Batch(at_s, self._dropped, [(self._since_s, self._rows)], self._others)
        self._rows, self._others, self._since_s = {}, [], at_s
        if last or not 0 <= at_s - self._served_since_s < SERVED_EVERY_S:
            batch.rows.append((self._served_since_s, self._served))
            self._served, self._served_since_s = {}, at_s
        self._idle = False
        self._batches.put(batch)

    def close(self) -> None:
        self.turn(last=True)
        self._batches.put(None)
        self._thread.join(1.0)

    def _write_batches(self) -> None:
        while (batch := self._batches.get()) is not None:
            dropped = batch.dropped + self._lost
            happened = Happened(action=Action.EVENTS_DROPPED, count=dropped - self._reported_dropped)
            if dropped > self._reported_dropped and self._line(batch.at_s, happened):
                self._reported_dropped = dropped
            for since_s, rows in batch.rows:
                for row, counted in rows.items():
                    if not self._line(batch.at_s, self._of(row, counted, since_s)):
                        self._lost += counted.count
            for one in batch.others:
                self._lost += not self._line(batch.at_s, one)
            self._idle = True

    def _of(self, row: Row, counted: _Counted, since_s: float) -> Happened:
        action, reason, scope, tenant = row
        about = replace(self._about, action=action, reason=reason or None, scope=scope, tenant=tenant or None)
        ids = tuple(counted.ids) or None
        return replace(about, count=counted.count, request_ids=ids, since=instant(since_s))

    def _line(self, at_s: float, happened: Happened) -> bool:
        self._sequence += 1
        try:
            self._write(self._emitter.line(self._sequence, at_s, happened))
        except OSError:
            return False
        return True


def write_whole(data: bytes) -> None:
    """Write to standard output unbuffered: a thread that blocks there must not delay the end of the process."""
    while data:
        data = data[os.write(1, data) :]

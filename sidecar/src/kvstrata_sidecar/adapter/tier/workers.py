"""Threads that run a tier's parts, each over its own carrier."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Permit, Refusal
from kvstrata_sidecar.adapter.tier.queues import Lane
from kvstrata_sidecar.adapter.tier.tasks import AnyPart, Carrier, Gain, TaskTable

ATTEMPTS = 3
"""Attempts at a part whose failure may be transient."""


class Worker(threading.Thread):
    """Serves one lane of the tier named `tier` until it is closed. `failed` receives exceptions that `refusal_of` maps
    to None; `worth_another` returns whether a part may succeed if tried again at once.
    """

    def __init__(
        self,
        name: str,
        lane: Lane,
        tasks: TaskTable,
        enforcement: Enforcement,
        carrier: Carrier,
        failed: Callable[[Exception], None],
        *,
        tier: str,
        refusal_of: Callable[[Exception], Refusal | None] = lambda _: None,
        worth_another: Callable[[Exception], bool] = lambda _: False,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._lane = lane
        self._tasks = tasks
        self._enforcement = enforcement
        self._carrier = carrier
        self._tier = tier
        self._failed = failed
        self._refusal_of = refusal_of
        self._worth_another = worth_another
        self._lock = threading.Lock()
        self._part: AnyPart | None = None
        self._aborted = False

    def run(self) -> None:
        while (taken := self._lane.take()) is not None:
            label, part = taken
            try:
                self._serve(part)
            finally:
                self._lane.done(label)
        self._carrier.close()

    def abort(self, which: Callable[[AnyPart], bool], why: str = "") -> None:
        """Make the part under way fail at once if `which` selects it; `why` blames the server that it waits for."""
        with self._lock:
            if self._part is not None and which(self._part):
                self._aborted = True
                self._carrier.abort(why)

    def _serve(self, part: AnyPart) -> None:
        error: Exception | None = None
        try:
            self._attempt(part)
        except Exception as failure:
            error = failure
            refusal = self._refusal_of(failure)
            if refusal is not None:
                part.refused(refusal)
            else:
                self._failed(failure)
            self._drop(part)
        part.over(error)

    def _attempt(self, part: AnyPart) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._exchange(part)
                return
            except Exception as error:
                if not self._worth_another(error) or self._aborted or attempt == ATTEMPTS:
                    raise

    def _exchange(self, part: AnyPart) -> None:
        """Run the part between begin and end, under a permit, abortable; raises the exchange's exception."""
        task = part.task
        permit: Permit | None = None
        gain = Gain()
        ended = False
        self._carrier.renew()
        with self._lock:
            self._part, self._aborted = part, False
        try:
            if task is not None and not self._tasks.begin(task):
                return
            try:
                entered = self._enter(part)
                if isinstance(entered, Refusal):
                    part.refused(entered)
                else:
                    permit = entered
                    part.run(self._carrier, gain)
                    if task is not None:
                        self._tasks.end(task, gain.hits, gain.keys, gain.sizes)
                    ended = True
            finally:
                if task is not None and not ended:
                    self._tasks.pause(task, gain.hits, gain.keys, gain.sizes)
        finally:
            with self._lock:
                self._part = None
            # Last: a pod acknowledges once permits are back, and by then every buffer is released and answered for.
            if permit is not None:
                permit.release()
        if not ended:
            self._drop(part)

    def _enter(self, part: AnyPart) -> Permit | Refusal | None:
        if part.keyspace is None:
            return None
        return self._enforcement.enter(
            part.keyspace, lambda: self.abort(lambda current: current is part), part.pools, self._tier
        )

    def _drop(self, part: AnyPart) -> None:
        if part.task is not None:
            self._tasks.drop(part.task)

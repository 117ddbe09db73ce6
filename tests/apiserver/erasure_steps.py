"""Where an erasure is held: at the writes of its record, of which each makes something known that nothing knew before.

An operator writes down what was heard before anything follows from it. So whoever dies while such a write is on its way
dies between a deed and its being known, or, if the write arrives and its answer does not, right after it is known.
What a step is follows from the record itself: no test has to be quick enough to meet it.
"""

from __future__ import annotations

import base64
import json
import lzma
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvstrata.model.erasure.facts import Deletion
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.reconcile.erasure.record_store import DATA_KEY, PREFIX, decode
from tests.support.api_proxy import ApiProxy
from tests.support.api_proxy_faults import WRITES, Held, Hold

KEPT, ENDED = "Kept", "Ended"
STEPS = frozenset(
    {
        KEPT, "Rolled", "PodSeen", "KeyRemoved", "Deletion Running", "PodErased", "Deletion Done", "Look", "PodProbed",
        "Verdict", "ReceiptWritten", ENDED,
    }
)  # fmt: skip
"""What the records of an undisturbed erasure come to have in them, one after the other, and that they begin and go."""

PATIENCE_S = 240.0


class Step:
    """A write that is held: what becomes known by it, and through which proxy it came."""

    def __init__(self, proxy: ApiProxy, words: frozenset[str], held: Held) -> None:
        self.proxy, self.words, self.held = proxy, words, held


class Steps:
    """Holds the erasure of one namespace at each of its steps, whichever of these proxies its operator is behind."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._names: set[str] = set()
        self._held: list[Step] = []
        self._new = threading.Condition()
        self.passed: set[str] = set()

    @contextmanager
    def holding(self, *proxies: ApiProxy) -> Iterator[Steps]:
        """Hold every step that has not passed, while the block runs."""
        with ExitStack() as rules:
            for proxy in proxies:
                hold = Hold(lambda held, proxy=proxy: self._arrive(proxy, held))  # type: ignore[misc]
                rules.enter_context(
                    proxy.fault(hold, path=r"/secrets(/|$)", methods=WRITES - {"PATCH"}, where=self._takes)
                )
            try:
                yield self
            finally:
                with self._new:
                    self.passed |= STEPS
                self.release(*proxies)

    def next(self, but: ApiProxy | None = None) -> Step:
        """Wait for a step that is held, which did not come through the proxy `but`, and return it."""
        until = time.monotonic() + PATIENCE_S
        with self._new:
            while True:
                for step in self._held:
                    if step.proxy is not but and not step.held.goes.is_set() and step.words - self.passed:
                        return step
                left_s = until - time.monotonic()
                assert left_s > 0, f"the erasure in {self._namespace} came to no step after {sorted(self.passed)}"
                self._new.wait(left_s)

    def passing(self, step: Step, *, mute: bool = False) -> None:
        """Carry a step out, and hold none that is the same any more."""
        step.held.mute = mute
        with self._new:
            self.passed |= step.words
        step.held.goes.set()

    def release(self, *proxies: ApiProxy) -> None:
        """Carry out all that is held of these, however late it is."""
        with self._new:
            stale = [step for step in self._held if step.proxy in proxies]
        for step in stale:
            step.held.goes.set()

    def _takes(self, path: str, body: bytes) -> bool:
        return bool(self._words(path, body) - self.passed)

    def _arrive(self, proxy: ApiProxy, held: Held) -> None:
        with self._new:
            self._held.append(Step(proxy, self._words(held.path, held.body), held))
            self._new.notify_all()

    def _words(self, path: str, body: bytes) -> frozenset[str]:
        name = path.rsplit("/", 1)[-1]
        if name in self._names and b"resourceVersion" not in body:
            return frozenset({ENDED})
        record = _record_in(body)
        if record is None or record.namespace != self._namespace:
            return frozenset()
        self._names.add(f"{PREFIX}{record.erasure.order.uid}")
        return frozenset({KEPT, *(_word(fact) for fact in record.erasure.facts.values())}) & STEPS


def _record_in(body: bytes) -> ErasureRecord | None:
    if PREFIX.encode() not in body:
        return None
    data = (json.loads(body).get("data") or {}).get(DATA_KEY)
    return decode(lzma.decompress(base64.b64decode(data))) if data else None


def _word(fact: object) -> str:
    return f"Deletion {fact.state}" if isinstance(fact, Deletion) else type(fact).__name__

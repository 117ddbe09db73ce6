"""Readers of a pool that ask all the while, so that each answer shows whether the pool was read at that moment.

An engine's own memory, and the tiers, keep blocks that a tenant computed itself under that tenant's salt. So a tenant's
hits on a prefix come from the pool for certain only at its first request, in any pod: each probe is another tenant's,
or of another prefix. Such pairs are many; when all have asked they begin again as repetitions, which must be answered
as well and show nothing about the pool.
"""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from .calls import Replica
from .kubectl import LIMIT_S
from .prompts import continuation

QUESTION_TOKENS = 8
"""It ends before the first of the words that the prefix alone has."""

ANSWER_TOKENS = 3

LITTLE_OF_THEIR_OWN = [{"tier": "cpu", "limit": "3Mi"}, {"tier": "shared", "limit": "3Mi"}]
"""Budgets of such readers: they are many, and a Redis tier that is full of their blocks takes none of a new pool."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One request of a reader, in monotonic seconds. `status` is 0 when no answer came.

    `fresh` is whether it is its tenant's first of this prefix: then all `cached_tokens` are a pool's.
    """

    pod: str
    tenant: str
    prefix: str = field(repr=False)
    fresh: bool
    began_at: float
    ended_at: float
    status: int
    problem: str = ""
    cached_tokens: int = 0
    text: str = ""


class Probes:
    """Requests of readers for one content after the other, and their answers."""

    def __init__(self, keys: Mapping[str, str], pause_s: float) -> None:
        self._keys = keys
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._turns: list[Iterator[tuple[str, str]]] = []
        self._asked: set[tuple[str, str]] = set()
        self._done: list[Probe] = []
        self._stop = threading.Event()

    def ask_for(self, prefixes: Sequence[str]) -> None:
        """Ask for another content from now on, in turn with those of before."""
        turns = itertools.cycle([(prefix, tenant) for tenant in self._keys for prefix in prefixes])
        with self._lock:
            self._turns.append(turns)

    @property
    def done(self) -> list[Probe]:
        """All requests that ended, in their order."""
        with self._lock:
            return list(self._done)

    @property
    def failed(self) -> list[Probe]:
        """Those that were not answered with 200."""
        return [one for one in self.done if one.status != 200]

    def fresh(self, prefixes: Sequence[str], since: float = 0.0, until: float = float("inf")) -> list[Probe]:
        """Return the first requests of tenants for these prefixes that began and ended within a time."""
        of = set(prefixes)
        return [
            one for one in self.done if one.fresh and one.prefix in of and since <= one.began_at < one.ended_at < until
        ]

    def wait_for(self, count: int) -> None:
        """Wait until so many more requests have ended. Raises AssertionError if they hang."""
        wanted, deadline = len(self.done) + count, time.monotonic() + LIMIT_S
        while len(self.done) < wanted:
            assert time.monotonic() < deadline, (
                f"requests hang: {wanted - len(self.done)} missing after {LIMIT_S:.0f} s"
            )
            time.sleep(0.05)

    def _next(self, number: int) -> tuple[str, str, bool]:
        with self._lock:
            prefix, tenant = next(self._turns[number % len(self._turns)])
            fresh = (prefix, tenant) not in self._asked
            self._asked.add((prefix, tenant))
            return prefix, tenant, fresh

    def _ask(self, where: Replica) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            prefix, tenant, fresh = self._next(number)
            began, status, problem, cached, text = time.monotonic(), 0, "", 0, ""
            try:
                answer = where.complete(self._keys[tenant], with_question(prefix), max_tokens=ANSWER_TOKENS)
                status, problem, cached = answer.status, answer.error, answer.cached_tokens
                text = answer.text if status == 200 else ""
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            ended = time.monotonic()
            with self._lock:
                self._done.append(Probe(where.pod, tenant, prefix, fresh, began, ended, status, problem, cached, text))
            self._stop.wait(self._pause_s)


def with_question(prefix: str) -> str:
    """Return the prompt of every reader for a prefix; the answer depends on the prefix's blocks."""
    return prefix + continuation(prefix, QUESTION_TOKENS)


@contextmanager
def probing(
    where: Sequence[Replica], keys: Mapping[str, str], prefixes: Sequence[str], pause_s: float = 0.3
) -> Iterator[Probes]:
    """Let readers ask each pod for a content while the block runs, `pause_s` seconds after each answer."""
    probes = Probes(keys, pause_s)
    probes.ask_for(prefixes)
    threads = [threading.Thread(target=probes._ask, args=(one,), daemon=True) for one in where]
    for thread in threads:
        thread.start()
    try:
        yield probes
    finally:
        probes._stop.set()
        for thread in threads:
            thread.join(130)

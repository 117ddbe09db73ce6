"""Requests that keep running while something happens to the cluster, and an account of how they fared."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .calls import Replica
from .kubectl import LIMIT_S


@dataclass(frozen=True, slots=True)
class Served:
    """One request and its outcome: `status` is 0 when the connection broke or no answer came.

    `cached_tokens` is how many tokens of the prompt the engine found, in its own memory or in a tier.
    """

    pod: str
    tenant: str
    began_at: float
    took_s: float
    status: int
    problem: str = ""
    cached_tokens: int = 0


@dataclass(slots=True)
class Account:
    """Outcomes of the requests of one time, in the order in which they ended. Times are monotonic seconds."""

    served: list[Served] = field(default_factory=list)

    @property
    def failed(self) -> list[Served]:
        """The requests that were not answered with 200."""
        return [one for one in self.served if one.status != 200]

    def since(self, moment: float) -> Account:
        """The requests that began at or after a moment."""
        return Account([one for one in self.served if one.began_at >= moment])

    def until(self, moment: float) -> Account:
        """The requests that had ended by a moment."""
        return Account([one for one in self.served if one.began_at + one.took_s <= moment])

    @property
    def cached_tokens(self) -> list[int]:
        """Cached tokens of each answered request."""
        return [one.cached_tokens for one in self.served if one.status == 200]

    @property
    def slowest_s(self) -> float:
        """The longest that a request took; 0 without requests."""
        return max((one.took_s for one in self.served), default=0.0)

    def took_s(self, percent: float) -> float:
        """The time within which `percent` of the requests were answered; 0 without requests."""
        ordered = sorted(one.took_s for one in self.served)
        return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else 0.0

    def __str__(self) -> str:
        problems = sorted({f"{one.status} {one.problem}".strip() for one in self.failed})
        failures = f", not answered: {len(self.failed)} ({'; '.join(problems)[:300]})" if problems else ""
        return f"{len(self.served)} requests, p50 {self.took_s(50):.2f} s, slowest {self.slowest_s:.2f} s{failures}"


class Traffic:
    """Tenants that ask without a pause, each in a thread of its own."""

    def __init__(self) -> None:
        self._account = Account()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def account(self) -> Account:
        """A copy of what happened so far."""
        with self._lock:
            return Account(list(self._account.served))

    def wait_for(self, count: int) -> None:
        """Wait until that many more requests have ended. Raises AssertionError if they hang."""
        wanted = len(self.account.served) + count
        deadline = time.monotonic() + LIMIT_S
        while len(self.account.served) < wanted:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"requests hang: {wanted - len(self.account.served)} missing after {LIMIT_S:.0f} s"
                )
            time.sleep(0.05)

    def _ask_for_ever(self, where: Replica, tenant: str, key: str, prompt: Callable[[], str], pause_s: float) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            cached = 0
            try:
                # One token: further ones cost the engine as much processor time as the prompt, and show nothing.
                answer = where.complete(key, prompt(), max_tokens=1)
                status, problem, cached = answer.status, answer.error, answer.cached_tokens
            except (OSError, http.client.HTTPException) as error:
                status, problem = 0, f"{type(error).__name__}: {error}"
            with self._lock:
                took = time.monotonic() - began
                self._account.served.append(Served(where.pod, tenant, began, took, status, problem, cached))
            self._stop.wait(pause_s)


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant that asks one replica: its name and API key, and the prompt of each request."""

    where: Replica
    tenant: str
    key: str
    prompt: Callable[[], str]


@contextmanager
def traffic(*callers: Caller, pause_s: float = 2.0) -> Iterator[Traffic]:
    """Let every caller ask while the block runs, `pause_s` seconds after each answer."""
    running = Traffic()
    threads = [
        threading.Thread(
            target=running._ask_for_ever,
            args=(caller.where, caller.tenant, caller.key, caller.prompt, pause_s),
            daemon=True,
        )
        for caller in callers
    ]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        running._stop.set()
        for thread in threads:
            thread.join(130)


def tokens_streamed(where: Replica, key: str, body: dict[str, Any]) -> tuple[int, bool]:
    """Stream a completion to its end; return how many events came and whether it ended as OpenAI's streams end."""
    events = [
        line
        for line in where.stream("/v1/completions", json.dumps({**body, "stream": True}).encode(), key)
        if line.startswith(b"data: ")
    ]
    return len(events), bool(events) and events[-1].strip() == b"data: [DONE]"

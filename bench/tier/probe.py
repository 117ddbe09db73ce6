"""A process that asks each of some servers one small question after the other, and notes how long answers take.

python -m bench.tier.probe DIRECTORY
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis

from bench.adapter.answers import serve
from bench.result import percentile
from kvstrata_sidecar.adapter.redis.client.slots import slot_of

ROUND_S = 0.005
"""From one round of questions to the next: two hundred answers a second of each server."""


class Probe:
    """Answers questions until standard input ends."""

    def __init__(self) -> None:
        self._asked: list[tuple[redis.Redis, str]] = []
        self._took_s: list[float] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one question."""
        return {"begin": self._begin, "end": self._end}[question.pop("op")](**question)

    def _begin(self, servers: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
        """Ask servers, each given by host, port and a slot that it has and keeps, for a small value in that slot."""
        self._ended.clear()
        self._took_s, self._asked = [], []
        for host, port, slot in servers:
            client = redis.Redis(host=host, port=port, protocol=2)
            name = next(name for n in itertools.count() if slot_of((name := f"probe-{n}").encode()) == slot)
            client.set(name, "small")
            self._asked.append((client, name))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return {}

    def _run(self) -> None:
        while not self._ended.wait(ROUND_S):
            for client, name in self._asked:
                began_s = time.perf_counter()
                with contextlib.suppress(redis.ResponseError):  # a redirection is an answer
                    client.get(name)
                self._took_s.append(time.perf_counter() - began_s)

    def _end(self) -> dict[str, Any]:
        """Return how long answers took, in milliseconds, and how many there were."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        took = self._took_s
        p50, p99, p999 = (1000 * percentile(took, percent) for percent in (50, 99, 99.9))
        return {"answers": len(took), "p50_ms": p50, "p99_ms": p99, "p999_ms": p999, "max_ms": 1000 * max(took)}


if __name__ == "__main__":
    serve(Probe().answer)

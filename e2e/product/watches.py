"""Watches, so that a test sees every state that an object was in, and when."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .kubectl import LIMIT_S, Kubectl


@dataclass(frozen=True, slots=True)
class Seen:
    """One state of an object. `at` is when its event arrived, in monotonic seconds."""

    at: float
    type: str
    object: dict[str, Any]

    @property
    def name(self) -> str:
        """The object's name."""
        return str(self.object["metadata"]["name"])


class Watch:
    """Every event of a watch so far, in their order."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._news = threading.Condition()

    @property
    def history(self) -> tuple[Seen, ...]:
        """A copy of the changes seen so far."""
        with self._news:
            return tuple(self._seen)

    def wait_for(
        self, what: str, holds: Callable[[dict[str, Any]], bool], since: float = 0, timeout_s: float = LIMIT_S
    ) -> Seen:
        """Return the first state from monotonic second `since` on for which `holds(object)` is true.

        Raises AssertionError with `what` and the last state after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        looked_at = 0
        with self._news:
            while True:
                for seen in self._seen[looked_at:]:
                    if seen.at >= since and holds(seen.object):
                        return seen
                looked_at = len(self._seen)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    last = self._seen[-1].object.get("status") if self._seen else None
                    raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last: {json.dumps(last)})")
                self._news.wait(left_s)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            with self._news:
                self._seen.append(Seen(time.monotonic(), event["type"], event["object"]))
                self._news.notify_all()


@contextmanager
def watch(kubectl: Kubectl, kind: str, namespace: str, *which: str) -> Iterator[Watch]:
    """Watch objects while the block runs: one by its name, or those of a selector (`-l`, `label=value`)."""
    process = kubectl.start("-n", namespace, "get", kind, *which, "--watch", "--output-watch-events", "-o", "json")
    watching = Watch()
    reader = threading.Thread(target=watching._read, args=(process,), daemon=True)
    reader.start()
    try:
        yield watching
    finally:
        process.terminate()
        process.wait(10)
        reader.join(10)

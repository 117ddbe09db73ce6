"""Faults that a proxy in front of an API server can apply to requests and to watches."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the API server's place; it never receives the request."""

    status: int
    reason: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def encoded(self) -> bytes:
        """The body: as given, or a `Status` with the reason, as API servers send it."""
        if self.body is not None:
            return self.body
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": "answered by the proxy",
            "reason": self.reason,
            "code": self.status,
        }
        return json.dumps(status).encode()


@dataclass(frozen=True, slots=True)
class BreakAfter:
    """Let the API server carry the request out, and break the connection before the first byte of its answer."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Send the first half of the API server's answer under its full length, and break the connection."""


@dataclass(frozen=True, slots=True)
class Garble:
    """Let the API server carry the request out, and answer 200 with a body that is no JSON."""

    body: bytes = b"<html><body>Bad gateway, have a nice day \xff</body></html>"


@dataclass(frozen=True, slots=True)
class Delay:
    """Pass the request on after some time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answer and keep the connection open; with `after` the API server carries the request out first."""

    after: bool = False


@dataclass(eq=False, slots=True)
class Held:
    """A request that is held back. Once it `goes` it is carried out, even if its client is gone, and answered unless
    it is `mute`."""

    body: bytes
    method: str
    path: str
    goes: threading.Event = field(default_factory=threading.Event)
    mute: bool = False
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep requests until each of them is released; `on_arrival` is called with each when it comes."""

    on_arrival: Callable[[Held], None]


Fault = Answer | BreakAfter | Truncate | Garble | Delay | Hang | Hold


@dataclass(slots=True)
class Rule:
    """Which requests get `fault`: by methods, path and body; at most `times` of them (None: all).

    `watch` chooses watches (True), everything else (False) or both. The path is searched for `path`, a pattern; `where`
    is given path and body.
    """

    fault: Fault
    path: str
    methods: frozenset[str]
    watch: bool | None = False
    times: int | None = None
    where: Callable[[str, bytes], bool] = lambda _path, _body: True
    hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, method: str, path: str, watch: bool, body: bytes) -> bool:
        """Whether this request gets the fault; it counts then."""
        if method not in self.methods or self.watch not in (None, watch) or not re.search(self.path, path):
            return False
        if not self.where(path, body):
            return False
        with self._lock:
            if self.times is not None and self.hits >= self.times:
                return False
            self.hits += 1
            return True


Event = Mapping[str, Any]


@dataclass(slots=True)
class Drop:
    """Events of watches that get lost: those of paths with `path` for which `where` holds, at most `times`."""

    path: str
    where: Callable[[Event], bool]
    times: int | None = None
    hits: int = 0

    def takes(self, path: str, event: Event) -> bool:
        """Whether this event gets lost; it counts then."""
        if (self.times is not None and self.hits >= self.times) or not re.search(self.path, path):
            return False
        if not self.where(event):
            return False
        self.hits += 1
        return True


WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
READS = frozenset({"GET"})
EXPIRED = {
    "type": "ERROR",
    "object": {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": "too old resource version: 1 (2)",
        "reason": "Expired",
        "code": 410,
    },
}
"""The event with which an API server ends a watch whose past it no longer has."""

"""Work that other threads leave for a tier's sweeper."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator

from kvstrata_sidecar.adapter.redis.client.commands import Place, call, read_number, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command

MAX_WAITING = 65_536
MEMBERS_PER_TOUCH = 500


class Inbox:
    """Touches of blocks, abandoned reservations, and scopes that must be swept before use. Thread-safe. `wake` is set
    when the policy changes or the tier is closed: then the present turn ends soon."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touches: dict[Place, None] = {}
        self._abandoned: deque[tuple[Place, bytes]] = deque(maxlen=MAX_WAITING)
        self._urgent: dict[str, None] = {}
        self.wake = threading.Event()
        self.closed = False

    def touch(self, place: Place) -> None:
        """Record that a block was read; sent within about a second, once for all reads until then."""
        with self._lock:
            if len(self._touches) < MAX_WAITING:
                self._touches[place] = None

    def abandon(self, place: Place, token: bytes) -> None:
        """Record that the reservation of a failed store can be released."""
        with self._lock:
            self._abandoned.append((place, token))

    def urge(self, keyspace: str) -> None:
        """Sweep a scope soon: it cannot be used in its present state."""
        with self._lock:
            if len(self._urgent) < MAX_WAITING:
                self._urgent[keyspace] = None

    @property
    def is_urgent(self) -> bool:
        return bool(self._urgent)

    def interrupts(self) -> bool:
        """Whether work has come that goes before all other: a scope that must be swept, or another policy."""
        return self.is_urgent or self.wake.is_set()

    def take_urgent(self) -> Collection[str]:
        with self._lock:
            urgent, self._urgent = self._urgent, {}
        return urgent

    def take_commands(self) -> Iterator[tuple[str, Command]]:
        """Yield the commands for touches and abandoned reservations, with their keyspace."""
        with self._lock:
            touches, self._touches = self._touches, {}
            abandoned, self._abandoned = self._abandoned, deque(maxlen=MAX_WAITING)
        by_bucket: dict[tuple[str, bytes], list[bytes]] = {}
        for place in touches:
            by_bucket.setdefault((place.keyspace, state_key(place.base)), []).append(place.member)
        for (keyspace, state), members in by_bucket.items():
            for start in range(0, len(members), MEMBERS_PER_TOUCH):
                yield keyspace, call("touch", state, read_number, members=members[start : start + MEMBERS_PER_TOUCH])
        for place, token in abandoned:
            yield place.keyspace, call("abandon", state_key(place.base), read_number, member=place.member, token=token)

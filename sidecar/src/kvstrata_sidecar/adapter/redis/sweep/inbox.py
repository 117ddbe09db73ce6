"""Work that other threads leave for a tier's sweeper."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.client.commands import Place, call, read_number, state_key
from kvstrata_sidecar.adapter.redis.client.resp import Command

ScopeTerms = tuple[SharedBounds | None, int | None]
"""A scope's bounds, and the life of its blocks in milliseconds."""


class Settling:
    """Scopes whose bounds the policy changed and a tier has yet to apply. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terms: Mapping[str, ScopeTerms] = {}
        self._changed: dict[str, ScopeTerms] = {}
        self._guarantees_changed = False

    def follow(self, terms: Mapping[str, ScopeTerms]) -> None:
        """Record what the terms now in force change; scopes that left the policy have nothing to settle."""
        with self._lock:
            promised, before = _promised(terms), _promised(self._terms)
            self._guarantees_changed = self._guarantees_changed or promised != before
            changed = {keyspace for keyspace, one in terms.items() if one != self._terms.get(keyspace, (None, None))}
            self._changed = {keyspace: terms[keyspace] for keyspace in (*self._changed, *changed) if keyspace in terms}
            self._terms = terms

    def pending(self) -> list[tuple[str, ScopeTerms]]:
        with self._lock:
            return list(self._changed.items())

    def done(self, keyspace: str, terms: ScopeTerms) -> None:
        """Record that these terms hold, unless others are in force by now."""
        with self._lock:
            if self._changed.get(keyspace) == terms:
                del self._changed[keyspace]

    def take_guarantees_changed(self) -> bool:
        """Whether guarantees changed since the last call: a new one needs loans back."""
        with self._lock:
            changed, self._guarantees_changed = self._guarantees_changed, False
            return changed

    def __len__(self) -> int:
        return len(self._changed)


def _promised(terms: Mapping[str, ScopeTerms]) -> dict[str, int]:
    return {name: bounds.guaranteed_bytes for name, (bounds, _) in terms.items() if bounds and bounds.guaranteed_bytes}


MAX_PENDING = 65_536
MEMBERS_PER_TOUCH = 500


@dataclass(slots=True)
class Pending:
    """Touches of blocks, abandoned reservations, and scopes that must be swept before use."""

    touches: dict[Place, None] = field(default_factory=dict)
    abandoned: deque[tuple[Place, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    urgent: dict[str, None] = field(default_factory=dict)

    def commands(self) -> Iterator[tuple[str, Command]]:
        """Yield the commands for touches and abandoned reservations, with their keyspace."""
        by_bucket: dict[tuple[str, bytes], list[bytes]] = {}
        for place in self.touches:
            by_bucket.setdefault((place.keyspace, place.base), []).append(place.member)
        for (keyspace, base), members in by_bucket.items():
            for start in range(0, len(members), MEMBERS_PER_TOUCH):
                batch = members[start : start + MEMBERS_PER_TOUCH]
                yield keyspace, call("touch", state_key(base), *batch, read=read_number)
        for place, token in self.abandoned:
            key = state_key(place.base)
            yield place.keyspace, call("abandon", key, place.member, token, read=read_number)

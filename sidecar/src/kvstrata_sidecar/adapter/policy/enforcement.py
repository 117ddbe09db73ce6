"""Decides which scopes may use a tier now: the cache view in force, its freshness, and the I/O under way.

One object serves all tiers of a pod. Every socket operation needs a permit. When a new view drops a keyspace, a
readable pool or a tier, no permit is given for it from that moment, and `settle` returns once the last I/O on it has
ended: only then may the pod acknowledge.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstrata.contract import ContractError
from kvstrata.contract.policy.cache_view import FRESHNESS_FORMAT, CacheView
from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata_sidecar.adapter.policy.ages import Ages
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.adapter.policy.limits import bounds_in
from kvstrata_sidecar.adapter.policy.pools import NOTHING_READABLE, Readable
from kvstrata_sidecar.adapter.policy.refusal import Refusal as Refusal

NANOSECONDS = 1_000_000_000

LoadedFrom = Callable[[Hashable, str, memoryview], None]
"""Receives LMCache's key of a loaded block, the keyspace that it is kept under, and the memory that it is in now."""


class FreshnessFile:
    """The moment of the last quorum read. Read with pread: truncation of a mapped file kills the reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def sent_ns(self, *, reopen: bool = False) -> int:
        """Return CLOCK_BOOTTIME nanoseconds, 0 for never or unreadable. `reopen` looks for a file that replaced it."""
        with self._lock:
            try:
                if reopen or self._descriptor is None:
                    self._close()
                    self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                data = os.pread(self._descriptor, FRESHNESS_FORMAT.size, 0)
            except OSError:
                return 0
        return int(FRESHNESS_FORMAT.unpack(data)[0]) if len(data) == FRESHNESS_FORMAT.size else 0

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


boottime_ns = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
"""Returns the clock that all containers of a node share and that counts suspension."""


@dataclass(slots=True, eq=False)
class Permit:
    """The right to use a keyspace for one socket operation, and to read `pools` on its behalf. `abort` must make that
    operation fail soon. `tier` is where it takes place, None if the policy's denials of tiers do not matter."""

    enforcement: Enforcement
    keyspace: str
    abort: Callable[[], None]
    pools: tuple[str, ...]
    tier: str | None

    def release(self) -> None:
        """Declare that the operation has ended and touches no buffer any more."""
        self.enforcement.give_back(self)


class Enforcement:
    """Holds the view in force for `domain` and gives permits under it. Thread-safe. `sent_ns` is FreshnessFile.sent_ns
    or a stand-in, `now_ns` the clock that it is compared with. All tiers of the process share `ages` and `keys`, the
    data keys for tiers that require encryption."""

    def __init__(self, domain: str, sent_ns: Callable[..., int], now_ns: Callable[[], int] = boottime_ns) -> None:
        self._domain = domain
        self._sent_ns = sent_ns
        self._now_ns = now_ns
        self.view: CacheView | None = None
        """The view in force; None before the first."""
        self.readable = NOTHING_READABLE
        """Chunks and readers of pools, under the view in force."""
        self._permits: set[Permit] = set()
        self._changed = threading.Condition()
        self.loaded_from: LoadedFrom | None = None
        """Called for each loaded block, before the load is answered; None while the server's memory is not governed."""
        self.fingerprints: Callable[[], Collection[str]] = tuple
        """Returns the fingerprints of the engines that have registered with this cache server."""
        self.ages = Ages()
        self.keys = DataKeys()

    def apply(self, view: CacheView, readable: Readable | None = None) -> None:
        """Put `view` in force; without `readable`, pools have no chunks. Raises ContractError for a view of another
        domain, of a lower revision or of a lower term."""
        with self._changed:
            current = self.view
            if view.domain != self._domain:
                raise ContractError("the cache view is of another domain")
            if current is not None and (view.revision < current.revision or view.term < current.term):
                raise ContractError(
                    f"revision {view.revision} of term {view.term} is older than"
                    f" revision {current.revision} of term {current.term}, which is in force"
                )
            # In this order: a pool's keyspace must never be used without knowing that it is one.
            self.readable = Readable.of(view, {}) if readable is None else readable
            self.view = view

    def settle(self, *, grace_s: float, timeout_s: float) -> bool:
        """Wait for I/O that the view forbids, aborting it after `grace_s`; return whether all of it ended."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._condemned(), grace_s):
                return True
            late = self._condemned()
        for permit in late:
            permit.abort()
        with self._changed:
            return self._changed.wait_for(lambda: not self._condemned(), timeout_s)

    def refusal(self, keyspace: str, pools: tuple[str, ...] = (), tier: str | None = None) -> Refusal | None:
        """Return why `keyspace` may not be used now, to read these pools, or in `tier`; None if it may."""
        view = self.view
        if not is_keyspace(keyspace):
            return Refusal.MALFORMED_KEYSPACE
        if view is None:
            return Refusal.NO_POLICY
        if keyspace not in view.keyspaces:
            return Refusal.UNKNOWN_KEYSPACE
        if not self.serves():
            return Refusal.STALE
        return _forbids(view, keyspace, pools, tier)

    def enter(
        self, keyspace: str, abort: Callable[[], None], pools: tuple[str, ...] = (), tier: str | None = None
    ) -> Permit | Refusal:
        """Return a permit for one socket operation, or the refusal; `tier` is None for maintenance of a tier."""
        with self._changed:
            refusal = self.refusal(keyspace, pools, tier)
            if refusal is not None:
                return refusal
            permit = Permit(self, keyspace, abort, pools, tier)
            self._permits.add(permit)
            return permit

    def give_back(self, permit: Permit) -> None:
        with self._changed:
            self._permits.discard(permit)
            self._changed.notify_all()

    def denies(self, keyspace: str, tier: str) -> bool:
        view = self.view
        return view is not None and _is_denied(view, tier, keyspace)

    def take_keys(self, directory: Path) -> None:
        view = self.view
        self.keys.follow(directory, view.generations if view is not None else {})

    def drop_keys(self) -> None:
        """Overwrite the data keys that the view does not name; to be called when no I/O needs them any more."""
        view = self.view
        self.keys.retire(view.generations if view is not None else {})

    def under_way(self, keyspaces: Collection[str]) -> int:
        """Return how many operations are under way on these keyspaces, or read them as pools."""
        with self._changed:
            return sum(
                permit.keyspace in keyspaces or any(pool in keyspaces for pool in permit.pools)
                for permit in self._permits
            )

    def keyless(self) -> int:
        """Return how many keyspaces of the view have no key to encrypt with."""
        view = self.view
        return self.keys.keyless(view.keyspaces.keys()) if view is not None else 0

    def serves(self) -> bool:
        """Whether the policy is fresh, or may be served stale."""
        view = self.view
        return view is not None and (view.rules.on_stale == "ServeStale" or self.fresh())

    def fresh(self) -> bool:
        """Whether the last quorum read is at most `staleAfter` old. A time in the future proves nothing."""
        view = self.view
        if view is None:
            return False
        limit_ns = view.rules.stale_after_s * NANOSECONDS
        for reopen in (False, True):
            sent_ns = self._sent_ns(reopen=reopen)
            if sent_ns and 0 <= self._now_ns() - sent_ns <= limit_ns:
                return True
        return False

    def _condemned(self) -> list[Permit]:
        view = self.view
        return [
            one
            for one in self._permits
            if view is None
            or one.keyspace not in view.keyspaces
            or _forbids(view, one.keyspace, one.pools, one.tier) is not None
        ]


def _is_denied(view: CacheView, tier: str, *keyspaces: str) -> bool:
    return any(bounds_in(view.keyspaces.get(name, ()), tier).denied for name in keyspaces)


def _forbids(view: CacheView, keyspace: str, pools: tuple[str, ...], tier: str | None) -> Refusal | None:
    """Return why a keyspace of the view may not read these pools, or be used in `tier`."""
    if pools and frozenset(pools).difference(view.reads.get(keyspace, ())):
        return Refusal.NOT_A_READER
    if tier is not None and _is_denied(view, tier, keyspace, *pools):
        return Refusal.NOT_ALLOWED
    return None

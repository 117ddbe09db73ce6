"""Puts revisions in force and acknowledges them.

A revision is acknowledged when new requests get nothing older (at once), requests on removed keyspaces have ended (by
themselves until `drainTimeout`, then aborted), and the adapter refuses those keyspaces (`adapter_link`). Draining
requests hold back the revision that removed their keyspace and later ones, not earlier ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol

from kvstrata.contract.policy.bundle import Bundle
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.policy.freshness import Freshness
from kvstrata_sidecar.gate.policy.grants import PoolSubject, still_granted
from kvstrata_sidecar.gate.policy.volume import PolicyVolume

_NEVER = float("inf")


class InFlight(Protocol):
    def abort(self) -> None:
        """End the request now, with an answer if one is still possible."""


class _Hold:
    """An admitted request's keyspace, empty for a random salt. `floor` is set once that keyspace was removed: the
    newest revision that may be acknowledged meanwhile. At `deadline` the request is aborted."""

    __slots__ = ("deadline", "floor", "keyspace", "subject")

    def __init__(self, subject: str | PoolSubject, keyspace: str) -> None:
        self.subject = subject
        self.keyspace = keyspace
        self.floor: int | None = None
        self.deadline = _NEVER


class Enforcement:
    def __init__(self, volume: PolicyVolume, freshness: Freshness, loop: asyncio.AbstractEventLoop) -> None:
        self.bundle: Bundle | None = None
        self.in_flight: dict[InFlight, _Hold] = {}
        self.acked = 0
        self.cache_boot = ""
        self.changed: list[Callable[[], None]] = []
        """Called after any change for the operator; must not raise."""
        self.revision_wanted = asyncio.Event()
        """Set when the adapter has a revision, or data keys, still to apply."""
        self.keys_brought = False
        """Whether key files were written since the adapter was last asked to apply a revision."""
        self._volume = volume
        self._freshness = freshness
        self._loop = loop
        self._adapter_revision = 0
        self._fenced = False
        self._reaper: asyncio.TimerHandle | None = None

    @property
    def revision(self) -> int:
        """The revision for new requests; 0 before the first."""
        return self.bundle.root.revision if self.bundle is not None else 0

    @property
    def term(self) -> int:
        return self.bundle.root.term if self.bundle is not None else 0

    def fresh(self) -> bool:
        return self.bundle is not None and self._freshness.fresh(self.bundle.root.rules.stale_after_s)

    def confirm(self, sent_ns: int) -> None:
        """A quorum read, sent at `sent_ns`, confirmed the revision in force."""
        was_fresh = self.fresh()
        self._freshness.confirm(sent_ns)
        self._volume.write_freshness(self._freshness.sent_ns)
        if not was_fresh:
            self._notify()

    def fence(self) -> None:
        """Check the age of the policy; called a few times a second.

        Under `onStale: Fence` a stale policy may have lost any keyspace, so requests on all of them get `drainTimeout`
        to end: none outlives a lost invalidation by more than `staleAfter + drainTimeout`. A confirmation before that
        lets them run on.
        """
        fenced = self.bundle is not None and self.bundle.root.rules.on_stale == "Fence" and not self.fresh()
        if fenced == self._fenced:
            return
        self._fenced = fenced
        if self.bundle is None:
            return
        deadline = self._loop.time() + self.bundle.root.rules.drain_timeout_s
        for hold in self.in_flight.values():
            if hold.keyspace and hold.floor is None:
                hold.deadline = deadline if fenced else _NEVER
        if fenced:
            log.warning("the policy is stale: requests run without reuse", age_ms=self._freshness.age_ms())
        self._arm_reaper()
        self._notify()

    def apply(self, bundle: Bundle) -> None:
        # The policy is on the volume before any request is granted under it: the cache server never learns of a
        # keyspace later than the engine does.
        self._volume.write_policy(bundle)
        before = self.revision
        self.bundle = bundle
        deadline = self._loop.time() + bundle.root.rules.drain_timeout_s
        draining = 0
        for hold in self.in_flight.values():
            if hold.keyspace and not still_granted(bundle, hold.subject, hold.keyspace):
                if hold.floor is None:
                    hold.floor, hold.deadline = before, min(hold.deadline, deadline)
                draining += 1
        log.info("a policy revision is in force", revision=bundle.root.revision, term=bundle.root.term,
                 tenants=len(bundle.entries), draining=draining)  # fmt: skip
        self.revision_wanted.set()
        self._arm_reaper()
        self._advance()
        self._notify()

    def keys_came(self) -> None:
        """Have the adapter read delivered data keys of the revision in force."""
        self.keys_brought = True
        self.revision_wanted.set()
        self._notify()

    def requests_on(self, keyspaces: Collection[str]) -> int:
        return sum(hold.keyspace in keyspaces for hold in self.in_flight.values())

    def admit(self, request: InFlight, subject: str | PoolSubject, keyspace: str) -> None:
        """Record a request that was granted `keyspace` (empty: a random salt) under the bundle in force."""
        self.in_flight[request] = _Hold(subject, keyspace)

    def release(self, request: InFlight) -> None:
        hold = self.in_flight.pop(request, None)
        if hold is not None and hold.floor is not None:
            self._advance()

    def adapter_applied(self, revision: int, boot: str) -> None:
        changed = boot != self.cache_boot
        self.cache_boot = boot
        self._adapter_revision = revision
        if revision == self.revision:
            self._volume.policy_applied()
        self._advance()
        if changed:
            self._notify()

    def adapter_lost(self) -> None:
        """The next adapter has to apply the revision again."""
        self._adapter_revision = 0
        if self.cache_boot:
            self.cache_boot = ""
            self._notify()

    def _advance(self) -> None:
        if not self.cache_boot:
            return
        floors = [hold.floor for hold in self.in_flight.values() if hold.floor is not None]
        reached = min(self._adapter_revision, *floors) if floors else self._adapter_revision
        if reached > self.acked:
            self.acked = reached
            log.info("a policy revision is acknowledged", revision=reached)
            self._notify()

    def _arm_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        deadline = min((hold.deadline for hold in self.in_flight.values()), default=_NEVER)
        if deadline < _NEVER:
            self._reaper = self._loop.call_at(deadline, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        now = self._loop.time()
        late = [request for request, hold in self.in_flight.items() if hold.deadline <= now]
        for request in late:
            request.abort()
            self.release(request)
        if late:
            log.warning("requests on keyspaces that may be gone were aborted", requests=len(late))
        self._arm_reaper()

    def _notify(self) -> None:
        for callback in tuple(self.changed):
            callback()

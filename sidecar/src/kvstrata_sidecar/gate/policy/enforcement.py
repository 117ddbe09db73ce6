"""Puts revisions in force and acknowledges them.

A revision is acknowledged when new requests get nothing older (at once), requests on removed keyspaces have ended (by
themselves until `drainTimeout`, then aborted), and the adapter refuses those keyspaces (`adapter_link`). Draining
requests hold back the revision that removed their keyspace and later ones, not earlier ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvstrata.contract.policy.bundle import Bundle, Rules
from kvstrata_sidecar.gate import log
from kvstrata_sidecar.gate.policy.grants import PoolSubject, still_granted
from kvstrata_sidecar.gate.policy.identity import ResolvedIdentity
from kvstrata_sidecar.gate.policy.volume import PolicyVolume

_NEVER = float("inf")
_CLOCKS_DIFFER_S = 0.5
boottime_ns = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Freshness:
    """Age of the policy in force. `sent_ns` is when the last good quorum read of its root was *sent*, as later commits
    may be missing; 0 before the first. CLOCK_BOOTTIME includes suspension, and no time service changes it."""

    now_ns: Callable[[], int] = boottime_ns
    sent_ns: int = 0

    def confirm(self, sent_ns: int) -> None:
        """Record an answered read; an older one than known changes nothing."""
        self.sent_ns = max(self.sent_ns, sent_ns)

    def age_ms(self) -> int:
        """Return the age in milliseconds, or -1 before the first read."""
        return (self.now_ns() - self.sent_ns) // 1_000_000 if self.sent_ns else -1

    def fresh(self, stale_after_s: int) -> bool:
        """Whether the last read was sent within `stale_after_s`. A clock that ran backwards is not fresh."""
        return bool(self.sent_ns) and 0 <= self.now_ns() - self.sent_ns <= stale_after_s * 1_000_000_000


class InFlight(Protocol):
    def abort(self) -> None:
        """End the request now, with an answer if one is still possible."""


@dataclass(slots=True, repr=False)
class _Hold:
    """An admitted request's keyspace, empty for a random salt. `floor` is set once that keyspace was removed: the
    newest revision that may be acknowledged meanwhile. At `deadline` the request is aborted."""

    subject: str | PoolSubject
    keyspace: str
    floor: int | None = None
    deadline: float = _NEVER


@dataclass(eq=False)
class Enforcement:
    """`changed` is called after any change for the operator, and must not raise. `revision_wanted`: the adapter has a
    revision, or data keys, still to apply; `keys_brought`: key files were written since it was last asked to. `gone`:
    the bundle was deleted, or is that of another CachedModel, so no later policy comes."""

    volume: PolicyVolume
    freshness: Freshness
    loop: asyncio.AbstractEventLoop
    identity: ResolvedIdentity
    bundle: Bundle | None = None
    in_flight: dict[InFlight, _Hold] = field(default_factory=dict)
    acked: int = 0
    cache_boot: str = ""
    changed: list[Callable[[], None]] = field(default_factory=list)
    revision_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    keys_brought: bool = False
    gone: bool = False
    _adapter_revision: int = 0
    _fenced: bool = False
    _reaper: asyncio.TimerHandle | None = None

    @property
    def revision(self) -> int:
        """The revision for new requests; 0 before the first."""
        return self.bundle.root.revision if self.bundle is not None else 0

    @property
    def term(self) -> int:
        return self.bundle.root.term if self.bundle is not None else 0

    @property
    def withheld(self) -> str:
        """Why this pod serves without reuse, with any `onStale`; empty if it does not."""
        return "stale" if self.gone else self.identity.withheld

    def fresh(self) -> bool:
        fresh = self.bundle is not None and self.freshness.fresh(self.bundle.root.rules.stale_after_s)
        return fresh and not self.gone

    def lose(self) -> None:
        """Fence at once, as a stale policy does, also under `onStale: ServeStale`, until a bundle is confirmed."""
        self.gone = True
        self.volume.write_freshness(0)
        self.fence()

    def confirm(self, sent_ns: int) -> None:
        """A quorum read, sent at `sent_ns`, confirmed the revision in force."""
        was_fresh = self.fresh()
        self.gone = False
        self.freshness.confirm(sent_ns)
        self.volume.write_freshness(self.freshness.sent_ns)
        if not was_fresh:
            self.notify()

    def fence(self) -> None:
        """Check the age of the policy; called a few times a second. Under `onStale: Fence` a stale one may have lost
        any keyspace: no request begins with one, shared and file tiers take nothing, and requests that run get
        `maxRequestDuration` to end, so none outlives a lost erasure by more than `staleAfter + maxRequestDuration`."""
        fences = self.bundle is not None and self.bundle.root.rules.on_stale == "Fence"
        fenced = self.gone or (fences and not self.fresh())
        if fenced and self.bundle is not None:
            self._bound(self.bundle.root.rules)
        if fenced == self._fenced:
            return
        self._fenced = fenced
        if self.bundle is None:
            return
        for hold in self.in_flight.values():
            if not fenced and hold.keyspace and hold.floor is None:
                hold.deadline = _NEVER
        if fenced:
            log.warning("the policy is stale: requests run without reuse", age_ms=self.freshness.age_ms())
        self._arm_reaper()
        self.notify()

    def _bound(self, rules: Rules) -> None:
        """Bound requests that run under a stale policy by its age, which counts suspension, as the loop's clock does
        not."""
        left_s = rules.stale_after_s + rules.max_request_s - self.freshness.age_ms() / 1000
        deadline = self.loop.time() + max(0.0, left_s)
        late = [one for one in self.in_flight.values() if one.keyspace and one.floor is None]
        if any(one.deadline > deadline + _CLOCKS_DIFFER_S for one in late):
            for one in late:
                one.deadline = deadline
            self._arm_reaper()

    def apply(self, bundle: Bundle) -> None:
        # The policy is on the volume before any request is granted under it: the cache server never learns of a
        # keyspace later than the engine does.
        self.volume.write_policy(bundle)
        before = self.revision
        self.bundle = bundle
        deadline = self.loop.time() + bundle.root.rules.drain_timeout_s
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
        self.notify()

    def keys_came(self) -> None:
        """Have the adapter read delivered data keys of the revision in force."""
        self.keys_brought = True
        self.revision_wanted.set()
        self.notify()

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
            self.volume.policy_applied()
        self._advance()
        if changed:
            self.notify()

    def adapter_lost(self) -> None:
        """The next adapter has to apply the revision again."""
        self._adapter_revision = 0
        if self.cache_boot:
            self.cache_boot = ""
            self.notify()

    def _advance(self) -> None:
        if not self.cache_boot:
            return
        floors = [hold.floor for hold in self.in_flight.values() if hold.floor is not None]
        reached = min(self._adapter_revision, *floors) if floors else self._adapter_revision
        if reached > self.acked:
            self.acked = reached
            log.info("a policy revision is acknowledged", revision=reached)
            self.notify()

    def _arm_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        deadline = min((hold.deadline for hold in self.in_flight.values()), default=_NEVER)
        if deadline < _NEVER:
            self._reaper = self.loop.call_at(deadline, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        now = self.loop.time()
        late = [request for request, hold in self.in_flight.items() if hold.deadline <= now]
        for request in late:
            request.abort()
            self.release(request)
        if late:
            log.warning("requests on keyspaces that may be gone were aborted", requests=len(late))
        self._arm_reaper()

    def notify(self) -> None:
        for callback in tuple(self.changed):
            callback()

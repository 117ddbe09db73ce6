"""Leadership by a Lease: one operator acts, the others stay warm.

The client library's election neither exposes the transition count, which bundles carry as their term, nor measures
expiry on a monotonic clock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import LEASE

log = logging.getLogger(__name__)

DURATION_S = 15.0
RENEW_EVERY_S = 2.0
RENEW_DEADLINE_S = 10.0
ATTEMPT_TIMEOUT_S = 4.0
"""Leaves time for a second attempt on a new connection before RENEW_DEADLINE_S."""
RETRY_EVERY_S = 1.0
"""How often a candidate tries; bounds how long a released Lease stays free."""

LEASE_NAME = "kvstrata-operator"
RELEASE = "kvstrata.io/release"
"""Annotation of the Lease: the Helm release that has it. It is taken away when that is uninstalled, or by a person."""

RELEASE_TIMEOUT_S = 5.0
"""A process that ends has no more time than its pod's grace period."""


Monotonic = Callable[[], float]
"""Seconds that no clock change moves."""

Fit = Callable[[], bool]


class WentBackError(RuntimeError):
    """The API server was restored from a backup. All that the process knows is of a lost history: it must restart."""


class Lease:
    """A candidate for one Lease. A holder that could not renew for RENEW_DEADLINE_S must stop before DURATION_S, when
    another may start. While `fit` returns False, the Lease is neither taken nor renewed. `release` is that of Helm: two
    in one namespace would serve the namespaces of one of them only, so a Lease of another is never taken."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        monotonic: Monotonic,
        fit: Fit = lambda: True,
        release: str = "",
    ) -> None:
        self._kube, self._namespace, self._name, self._identity = kube, namespace, name, identity
        self._monotonic, self._fit, self._release = monotonic, fit, release
        self._waits_for = ""
        self._observed: tuple[str, str] = ("", "")
        self._observed_at = monotonic()
        self._renewed_at = float("-inf")
        self._written: dict[str, Any] | None = None
        self._newest: tuple[str, int] = ("", 0)
        """UID and highest seen resourceVersion of the Lease."""
        self._wrote_at = ""
        self.term = 0

    @property
    def held(self) -> bool:
        """Whether this process holds the Lease, judged without a request. After a freeze it is False as soon as the
        process runs again, before `hold` does."""
        return self._monotonic() - self._renewed_at < RENEW_DEADLINE_S

    async def acquire(self) -> int:
        """Wait for the Lease; return its term, which grows with every change of holder. Raises WentBackError."""
        while True:
            try:
                # A slow answer may describe a Lease that has expired since.
                if self._fit() and await self._try_once() and self.held:
                    log.info("leading", extra={"term": self.term, "lease": self._name})
                    return self.term
            except KubeError as error:
                log.warning("the lease cannot be read or written", extra={"error": str(error)})
            await asyncio.sleep(RETRY_EVERY_S)

    async def hold(self) -> None:
        """Renew until that fails for RENEW_DEADLINE_S or another process holds the Lease; then the caller must stop."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            # An attempt that hangs must not outlast the deadline, because the successor does not wait for it.
            left_s = max(0.0, self._renewed_at + RENEW_DEADLINE_S - self._monotonic())
            try:
                if not self._fit():
                    log.error("the process hangs; its lease is not renewed")
                elif not await asyncio.wait_for(self._try_once(), min(left_s, ATTEMPT_TIMEOUT_S)):
                    log.error("another operator holds the lease")
                    return
            except WentBackError as error:
                self._renewed_at = float("-inf")
                log.error("leadership ends", extra={"error": str(error)})
                return
            except (KubeError, TimeoutError) as error:
                log.warning("the lease was not renewed", extra={"error": str(error)})
            if not self.held:
                log.error("the lease could not be renewed in time")
                return

    async def release(self) -> None:
        """Release the Lease, so that a successor need not wait for its expiry. Failure is harmless."""
        if not self.held:
            return
        try:
            await asyncio.wait_for(self._give_up(), RELEASE_TIMEOUT_S)
        except (KubeError, TimeoutError) as error:
            log.info("the lease was not released", extra={"error": str(error)})

    async def _give_up(self) -> None:
        lease = await self._kube.get(LEASE, self._namespace, self._name)
        # From here on another process may lead, whether the write is answered or not.
        self._renewed_at = float("-inf")
        if lease and lease["spec"].get("holderIdentity") == self._identity:
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            await self._kube.replace(LEASE, self._namespace, lease)

    async def _try_once(self) -> bool:
        asked_at = self._monotonic()
        # The last written version saves a read: the replace is conditional on it.
        lease, self._written = self._written, None
        if lease is None:
            lease = await self._kube.get(LEASE, self._namespace, self._name)
            self._look_for_restore(lease)
        answered_at = self._monotonic()
        now, create = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), lease is None
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            lease = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata}
        spec = lease.setdefault("spec", {})
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime") or "")
        if seen != self._observed:
            # The renewal may be as young as the answer: the holder counts from when it sent the write.
            self._observed, self._observed_at = seen, answered_at
        expires_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
        annotations = lease["metadata"].setdefault("annotations", {})
        release = annotations.get(RELEASE) or self._release
        is_held = holder not in ("", self._identity) and asked_at - self._observed_at < expires_s
        if is_held or release != self._release:
            self._stand_by(holder, release)
            return False
        self._waits_for = ""
        annotations |= {RELEASE: self._release} if self._release else {}
        if holder != self._identity or not self.term:
            # A restarted container has its predecessor's name, but needs a term of its own.
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": self._identity, "renewTime": now, "leaseDurationSeconds": int(DURATION_S)}
        return await self._write(lease, create=create)

    def _stand_by(self, holder: str, release: str) -> None:
        """Log the leader that this process waits for, once for each."""
        if f"{release}/{holder}" == self._waits_for:
            return
        self._waits_for = f"{release}/{holder}"
        if release == self._release:
            log.info("standing by", extra={"leader": holder})
        else:
            log.error(
                "another Helm release has this namespace, and one serves from it: install this one into a namespace of "
                "its own, or uninstall the other; if it is gone, remove the annotation %s of Lease %s",
                RELEASE,
                self._name,
                extra={"release": release, "leader": holder},
            )

    def _look_for_restore(self, lease: dict[str, Any] | None) -> None:
        """Raise WentBackError for a Lease that is older than one seen before, or than this process' own last write.
        The versions of one object only grow. A backup may also be restored under higher versions, so that watches
        end; then the holder finds an older renewTime than it wrote."""
        if lease is None:
            return
        uid, version = _version_of(lease)
        spec = lease.get("spec") or {}
        own = self.held and spec.get("holderIdentity") == self._identity
        older = version < self._newest[1] or (own and (spec.get("renewTime") or "") < self._wrote_at)
        if uid == self._newest[0] and older:
            raise WentBackError("the API server shows an older Lease than before: it was restored from a backup")
        self._newest = uid, version

    async def _write(self, lease: dict[str, Any], *, create: bool) -> bool:
        sent_at = self._monotonic()
        try:
            write = self._kube.create if create else self._kube.replace
            stored = await write(LEASE, self._namespace, lease)
        except KubeError as error:
            # A holder's conflict is most often with itself: HTTP clients repeat a PUT after a broken connection. The
            # next read shows the holder; until then this attempt failed and does not extend leadership.
            if error.is_conflict and not self.held:
                return False
            raise
        # Counted from before the request: the successor counts from when it sees the write, which is later. The read
        # before it does not count: a slow one would leave a new leader no time to renew.
        self._renewed_at, self._written = sent_at, stored
        self._newest, self._wrote_at = _version_of(stored), stored["spec"].get("renewTime") or ""
        self.term = int(stored["spec"].get("leaseTransitions") or 1)
        return True


def _version_of(lease: dict[str, Any]) -> tuple[str, int]:
    metadata = lease.get("metadata") or {}
    return str(metadata.get("uid") or ""), int(metadata.get("resourceVersion") or 0)


TICK_EVERY_S = 1.0
SILENT_LIMIT_S = 60.0
"""How long the caller's event loop may stall before renewals stop: longer than any work takes on a starved machine,
and about when the kubelet gives up a process that answers no probe."""

T = TypeVar("T")


class Leadership:
    """Contends for a Lease and renews it in a thread, with an event loop and a connection of its own.

    `connect` and `candidate`, which makes the candidate, run in that thread. All methods are for the caller's event
    loop. When it stalls for SILENT_LIMIT_S, the Lease runs out: another process can act.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Kube]], candidate: Callable[[Kube, Fit], Lease], monotonic: Monotonic
    ) -> None:
        self._connect, self._candidate, self._monotonic = connect, candidate, monotonic
        self._ticked_at = monotonic()
        self._ticking: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._lease: Lease | None = None
        self._holding: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        return self._lease is not None and self._lease.held

    async def acquire(self) -> int:
        """Wait until this process holds the Lease; return its term. From then on it is renewed. Call it once."""
        self._tick()
        threading.Thread(target=self._loop.run_forever, name="lease", daemon=True).start()
        return await self._there(self._acquire())

    async def hold(self) -> None:
        """Return when the Lease is lost: the caller stops. Cancelling this ends the renewals."""
        await self._there(self._hold())

    async def release(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await self._there(self._release())

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _tick(self) -> None:
        self._ticked_at = self._monotonic()
        self._ticking = asyncio.get_running_loop().call_later(TICK_EVERY_S, self._tick)

    def _turns(self) -> bool:
        return self._monotonic() - self._ticked_at < SILENT_LIMIT_S

    async def _acquire(self) -> int:
        self._lease = self._candidate(await self._connect(), self._turns)
        term = await self._lease.acquire()
        # Not in `hold`: the caller may be busy for longer than a renewal can wait.
        self._holding = asyncio.create_task(self._lease.hold(), name="lease")
        return term

    async def _hold(self) -> None:
        if self._holding is not None:
            await self._holding

    async def _release(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            await asyncio.gather(self._holding, return_exceptions=True)
        if self._lease is not None:
            await self._lease.release()

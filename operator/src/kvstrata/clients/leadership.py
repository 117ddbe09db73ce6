"""The Lease in a thread of its own, so that no stretch of work, however long, keeps it from being renewed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvstrata.clients.kube import Kube
from kvstrata.clients.lease import Lease

log = logging.getLogger(__name__)

TICK_EVERY_S = 1.0
SILENT_LIMIT_S = 60.0
"""How long the caller's event loop may not turn before its process counts as hung, and renews no more. More than any
stretch of work takes on a starved machine; the kubelet gives up a process that answers no probe at about that time."""

T = TypeVar("T")


class Leadership:
    """Contends for a Lease and renews it in a thread, with an event loop and a connection of its own.

    `connect` makes the connection, in that thread; `monotonic` gives seconds that no clock change moves. All methods
    are for one event loop, the caller's. When that one has not turned for SILENT_LIMIT_S, the Lease is neither taken
    nor renewed, and runs out: a process that does nothing more must not keep another from acting.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Kube]],
        namespace: str,
        name: str,
        identity: str,
        monotonic: Callable[[], float],
    ) -> None:
        self._connect, self._namespace, self._name, self._identity = connect, namespace, name, identity
        self._monotonic = monotonic
        self._ticked_at = monotonic()
        self._ticking: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._lease: Lease | None = None
        self._holding: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        """Whether the Lease is this process' own now, as far as it can know without asking; see `Lease.held`."""
        return self._lease is not None and self._lease.held

    async def acquire(self) -> int:
        """Wait until this process holds the Lease; return its term. From then on it is renewed. Call it once."""
        self._tick()
        threading.Thread(target=self._loop.run_forever, name="lease", daemon=True).start()
        return await self._there(self._acquire())

    async def hold(self) -> None:
        """Return when the Lease is lost: the caller stops. To cancel this ends the renewals."""
        await self._there(self._hold())

    async def release(self) -> None:
        """End the renewals and give the Lease up, if it is held. Failure to do so is harmless."""
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
        kube = await self._connect()
        self._lease = Lease(kube, self._namespace, self._name, self._identity, self._monotonic, self._turns)
        term = await self._lease.acquire()
        # Not when the caller hears of it, which may be busy for longer than a renewal can wait.
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

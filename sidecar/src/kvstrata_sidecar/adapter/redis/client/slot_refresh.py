"""The thread that fetches a cluster's slot map: on a schedule, after a redirection or a lost connection, and every
second while a server is away. Requests that arrive during a fetch are merged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.nodes import Topology
from kvstrata_sidecar.adapter.redis.client.resp import Command, ReplyError, TransportError
from kvstrata_sidecar.adapter.redis.client.slots import SLOTS, Address, SlotMap, read_slots
from kvstrata_sidecar.adapter.tier.threads import Upkeep

logger = logging.getLogger(__name__)

SCHEDULE_S = 30.0
IMPATIENT_S = 1.0
PAUSE_S = 0.25
"""Minimum pause between two fetches."""

QUESTION_TIMEOUT_S = 1.0
ASKED_AT_A_TIME = 8


class Scout(Upkeep):
    """Keeps a topology up to date until it is closed. `jitter` returns a number from 0 to 1."""

    def __init__(self, tier: TierParams, topology: Topology, jitter: Callable[[], float]) -> None:
        super().__init__(tier.name, "scout")
        self._tier = tier
        self._topology = topology
        self._jitter = jitter
        self._closed = threading.Event()
        self._last: tuple[Address, Connection] | None = None
        self._rest: list[Address] = []
        self._seeds = topology.seeds

    def run(self) -> None:
        while not self._closed.is_set():
            try:
                self.look()
            except Exception:
                logger.exception("The cluster could not be asked for its slots")
            if self._closed.wait(PAUSE_S):
                break
            period_s = SCHEDULE_S if self._topology.whole else IMPATIENT_S
            self._topology.wanted(period_s * (0.8 + 0.4 * self._jitter()))
        self._drop()

    def close(self) -> None:
        self._closed.set()
        self._topology.want()
        last = self._last
        if last is not None:
            last[1].abort()

    def look(self) -> None:
        """Ask until a server knows all slots, or adopt the best answer."""
        best: SlotMap | None = None
        problem = ""
        seeds = self._topology.seeds
        if seeds is not self._seeds:
            self._seeds, self._rest = seeds, []
        order = self._order(*self._topology.candidates())
        asked, self._rest = order[:ASKED_AT_A_TIME], order[ASKED_AT_A_TIME:]
        for address in asked:
            if self._closed.is_set():
                return
            try:
                answer = self._ask(address)
            except (TransportError, ReplyError) as error:
                problem = problem or str(error)
                self._drop()
                continue
            if best is None or answer.served > best.served:
                best = answer
            if best.served == SLOTS:
                break
        if best is not None and self._topology.adopt(best, seeds):
            logger.info("The cluster's slots: %s", ", ".join(map(str, best.primaries)))
        elif best is None and seeds:
            self._topology.problem = problem

    def _order(self, hint: Address | None, usable: Sequence[Address], known: Sequence[Address]) -> list[Address]:
        """Return the order of servers to ask: each pod begins elsewhere; servers left out last time come next."""
        first = [] if hint is None else [hint]
        if self._last is not None and self._last[0] in usable:
            first.append(self._last[0])
        start = int(self._jitter() * len(usable))
        return list(dict.fromkeys([*first, *usable[start:], *usable[:start], *self._rest, *known]))

    def _ask(self, address: Address) -> SlotMap:
        if self._last is None or self._last[0] != address or not self._last[1].usable:
            self._drop()
            self._last = (address, dial(address, self._tier))
        command = Command(b"", (b"CLUSTER", b"SLOTS"), lambda reply: read_slots(reply, address))
        answer: SlotMap | ReplyError
        (answer,) = self._last[1].exchange([command], give_up_after_s=QUESTION_TIMEOUT_S)
        if isinstance(answer, ReplyError):
            raise answer
        return answer

    def _drop(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].close()

"""Takes back loans when guarantees need them, and corrects the sum of a tier's division.

A tier is overcommitted when a policy guarantees more than is left, or a lost division is charged again. The holder of
the claim has the largest borrowers give back, down to one level, until every guarantee is covered. Two holders at once
cost cached blocks, no more. Room of keyspaces in no policy goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

from kvstrata.contract.store.redis_keys import rooms_claim_key
from kvstrata_sidecar.adapter.redis.budget.capacity_shares import kept_bytes
from kvstrata_sidecar.adapter.redis.budget.leases import Ledgers
from kvstrata_sidecar.adapter.redis.budget.reclaim_2 import Leftovers
from kvstrata_sidecar.adapter.redis.client.commands import Bounds, Transport, claim

RECLAIM_CLAIM_S = 5.0
HELD_S = 4.0
"""Time that a process relies on its claim; what it has begun by then ends within the rest."""

PATIENCE_S = 60.0
"""Time that loans are taken back after an excess was seen."""


class Reclaim:
    """Takes room back from the scopes of this process' policy. `clock` returns seconds. `permitted(keyspace)` yields
    whether the tier may be used for it and isolates its failure; `interrupted` is whether urgent work waits.
    """

    def __init__(
        self,
        domain: str,
        ledgers: Ledgers,
        token: bytes,
        clock: Callable[[], float],
        *,
        leftovers: Leftovers,
        bounds: Callable[[str], Bounds | None],
        permitted: Callable[[str], AbstractContextManager[bool]],
        count: Callable[[str, int], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._ledgers = ledgers
        self._rooms = ledgers.rooms
        self._leftovers = leftovers
        self._token = token
        self._clock = clock
        self._bounds = bounds
        self._permitted = permitted
        self._count = count
        self._interrupted = interrupted
        self._tidy_key = rooms_claim_key(domain, "w").encode()
        self._key = rooms_claim_key(domain, "g").encode()
        self._until_s = self._look_at_s = self._held_until_s = 0.0
        self._in_vain: set[str] = set()

    def begin(self) -> None:
        """Record that guarantees changed, or that a tier is overcommitted."""
        self._until_s = self._clock() + PATIENCE_S
        self._in_vain.clear()
        self._leftovers.begin()

    def turn(self, connect: Callable[[], Transport], keyspaces: Collection[str], tidy_every_s: float | None) -> None:
        """Do what is due if the capacity is divided; recompute its sum every `tidy_every_s`, None for not now."""
        first = next(iter(keyspaces), None)
        whole = self._bounds(first) if first is not None else None
        if whole is None or whole.capacity_bytes is None:
            return
        if tidy_every_s is not None and claim(connect(), self._tidy_key, self._token, int(tidy_every_s * 750)):
            self._count("drift_rooms", abs(self._rooms.tidy(connect())))
        if self._rooms.take_short() or tidy_every_s is not None:
            self._leftovers.begin()
        if not self._leftovers.turn(connect, keyspaces, whole.capacity_bytes):
            return
        if self._look_at_s <= self._clock() < self._until_s:
            self._take_back(connect, keyspaces, whole.capacity_bytes)

    def _take_back(self, connect: Callable[[], Transport], keyspaces: Collection[str], capacity_bytes: int) -> None:
        excess = self._rooms.excess(connect(), capacity_bytes)
        bounds = ((keyspace, self._bounds(keyspace)) for keyspace in keyspaces if excess)
        kept = {keyspace: kept_bytes(one) for keyspace, one in bounds if one and keyspace not in self._in_vain}
        lent = self._rooms.lent(connect(), kept)
        if not lent:
            self._until_s = 0.0
            return
        if not self._claimed(connect()):
            self._look_at_s = self._clock() + RECLAIM_CLAIM_S
            return
        for keyspace, amount in parts(lent, excess):
            if self._interrupted() or excess == 0:
                break
            with self._permitted(keyspace) as permitted:
                own = self._bounds(keyspace)
                if permitted and own is not None:
                    self._ledgers.give_back(connect(), keyspace, own, amount)
            before, excess = excess, self._rooms.excess(connect(), capacity_bytes)
            if excess >= before:
                # For example, its server is unreachable: others have to give more.
                self._in_vain.add(keyspace)

    def _claimed(self, transport: Transport) -> bool:
        now_s = self._clock()
        if now_s >= self._held_until_s and claim(transport, self._key, self._token, int(RECLAIM_CLAIM_S * 1000)):
            self._held_until_s = now_s + HELD_S
        return now_s < self._held_until_s


def parts(lent: Mapping[str, int], excess: int) -> list[tuple[str, int]]:
    """Return the bytes that each borrower gives back, largest first: all are cut down to one level."""
    ordered = sorted(lent.items(), key=lambda one: -one[1])
    total = 0
    for number, (_, size) in enumerate(ordered, 1):
        total += size
        following = ordered[number][1] if number < len(ordered) else 0
        if total - number * following >= excess:
            level = (total - excess) // number
            return [(keyspace, one - level) for keyspace, one in ordered[:number] if one > level]
    return ordered

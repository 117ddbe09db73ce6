"""Grants of a tier's capacity: guarantees belong to their scope, the rest is lent on demand.

A scope's grant bounds the leases of its ledger. It grows by loans of free bytes, and shrinks when it is unused or
when a new guarantee overcommits the tier. A growing grant is charged to the tier before the ledger is informed; for a
shrinking one the ledger comes first. Each change has a number, which voids decisions that were made before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvstrata.contract.store.redis_keys import capacity_key
from kvstrata.contract.store.redis_scripts import Argument
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.scope_state import Grant
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import MEMBERS_PER_COMMAND, call, reads_numbers
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply, Transport

GRANT_KEEP_MS = 7 * 86_400_000
"""Time that the grant of a scope in no policy stays charged; its blocks have expired by then."""

STALE_MS = 900_000
"""Time that a guarantee holds without renewal by a sweep; then its scope is in no policy."""

DEPARTED_GRACE_MS = 150_000
"""Time for which another model's policy may still have a keyspace that left a pod's; exceeds two sweep intervals."""

SCOPES_PER_STEP = 256

FREE_SHARE = 32
"""Part of a capacity kept free for loans, as long as keyspaces in no policy hold grants."""


@dataclass(frozen=True, slots=True)
class UnlistedScope:
    """A keyspace that no policy names: its charge, its last change, and the time since a policy had it."""

    keyspace: str
    charged_bytes: int
    sequence: int
    age_ms: int


class Change(NamedTuple):
    """A scope's grant, the number of its last change, and the bytes charged beyond the tier's capacity."""

    granted_bytes: int
    sequence: int
    overcommitted_bytes: int


class TierCapacity:
    """The capacity of one tier, on the server that has its hash."""

    def __init__(self, domain: str) -> None:
        self._key = capacity_key(domain).encode()
        self._short = False

    def grow(self, transport: Transport, keyspace: str, bounds: SharedBounds, ledger: Grant, wanted: int) -> Change:
        """Grant `wanted` bytes as far as they are guaranteed or free."""
        change = self._change(transport, "grow", keyspace, ledger, wanted=wanted, **_bounds(bounds))
        self._short = self._short or change.overcommitted_bytes + (bounds.capacity_bytes or 0) // FREE_SHARE > 0
        return change

    def charge(self, transport: Transport, keyspace: str, bounds: SharedBounds, ledger: Grant) -> Change:
        """Record a scope's present guarantee and leases."""
        return self._change(transport, "charge", keyspace, ledger, **_bounds(bounds))

    def shrink(
        self, transport: Transport, keyspace: str, bounds: SharedBounds, granted: int, sequence: int, age_ms: int = 0
    ) -> None:
        """Lower a grant that its ledger knows to be lowered, unless it was changed since `sequence`. A scope in no
        policy that is charged nothing is forgotten; `age_ms` is the time since a policy had it, 0 if one has it."""
        self._change(
            transport, "shrink", keyspace, None, granted=granted, sequence=sequence, age_ms=age_ms, **_bounds(bounds)
        )

    def release(self, transport: Transport, keyspace: str, ledger: Grant, sequence: int, age_ms: int) -> int:
        """End the guarantee of a scope in no policy, unless it was changed since `sequence` (0: in any case); return
        the number of this change, 0 if it was."""
        return self._change(transport, "release", keyspace, ledger, sequence=sequence, age_ms=age_ms).sequence

    def unlisted(self, transport: Transport, cursor: int) -> tuple[int, list[UnlistedScope]]:
        """Take one step of a walk over all scopes; return the next cursor, 0 at the end, and those in no policy."""
        step = call("unlisted", self._key, _read_unlisted, cursor=cursor, count=SCOPES_PER_STEP, stale_ms=STALE_MS)
        ((following, found),) = transport.ask([step])
        return following, found

    def take_short(self) -> bool:
        """Whether a scope that needed capacity found little left since the last call."""
        short, self._short = self._short, False
        return short

    def free(self, transport: Transport, capacity_bytes: int) -> int:
        """Return the bytes charged to no scope; negative if the tier is overcommitted."""
        ((charged,),) = transport.ask([Command(self._key, (b"HMGET", self._key, b"sum"), protocol.reads_fields(1))])
        return capacity_bytes - int(charged)

    def granted(self, transport: Transport, keyspaces: Iterable[str]) -> dict[str, int]:
        """Return the bytes granted to these scopes, without those that have none."""
        names = list(keyspaces)
        granted: dict[str, int] = {}
        for start in range(0, len(names), MEMBERS_PER_COMMAND):
            some = names[start : start + MEMBERS_PER_COMMAND]
            asked = call("granted", self._key, reads_numbers(len(some)), keyspaces=[name.encode() for name in some])
            granted |= zip(some, transport.ask([asked])[0], strict=True)
        return {name: size for name, size in granted.items() if size}

    def tidy(self, transport: Transport) -> int:
        """Recompute the sum of all charges and end guarantees of scopes in no policy; return the difference found."""
        cursor = walk = 0
        while True:
            step = call(
                "tidy", self._key, reads_numbers(3), cursor=cursor, mine=walk, count=SCOPES_PER_STEP,
                stale_ms=STALE_MS, keep_ms=GRANT_KEEP_MS,
            )  # fmt: skip
            ((cursor, walk, drift),) = transport.ask([step])
            if not cursor:
                return int(drift)

    def _change(
        self, transport: Transport, script: str, keyspace: str, ledger: Grant | None, **arguments: Argument
    ) -> Change:
        if ledger is not None:
            arguments |= {
                "leased": ledger.leased,
                "ledger_granted": ledger.granted_bytes,
                "ledger_sequence": ledger.ledger_sequence,
            }
        arguments |= {"keyspace": keyspace.encode(), "keep_ms": GRANT_KEEP_MS}
        (answer,) = transport.ask([call(script, self._key, reads_numbers(3), **arguments)])
        return Change(*answer)


def _bounds(bounds: SharedBounds) -> dict[str, int]:
    return {"guaranteed": bounds.kept_bytes, "capacity": bounds.capacity_bytes or 0}


def _read_unlisted(reply: Reply) -> tuple[int, list[UnlistedScope]]:
    if not isinstance(reply, list) or len(reply) % 4 != 1:
        raise FramingError("a step through the grants is malformed")
    cursor, *words = reply
    rows = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
    scopes = [UnlistedScope(protocol.read_text(name), *map(protocol.read_number, rest)) for name, *rest in rows]
    return protocol.read_number(cursor), scopes

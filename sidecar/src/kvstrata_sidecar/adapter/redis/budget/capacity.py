"""Grants of a tier's capacity: guarantees belong to their scope, the rest is lent on demand.

A scope's grant bounds what its ledger leases out. It grows by loans of free bytes, and shrinks when it is unused or
when a new guarantee overcommits the tier. A growing grant is charged to the tier before the ledger is informed; for a
shrinking one the ledger comes first. Each change has a number, which voids decisions that were made before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvstrata.contract.policy.keyspace import is_keyspace
from kvstrata.contract.store.redis_keys import capacity_key
from kvstrata.contract.store.redis_scripts import Argument
from kvstrata_sidecar.adapter.policy.limits import SharedBounds
from kvstrata_sidecar.adapter.redis.budget.scope_state import Grant
from kvstrata_sidecar.adapter.redis.client.commands import (
    MEMBERS_PER_COMMAND,
    Transport,
    call,
    read_list,
    read_moment_ms,
    read_number,
    read_text,
    reads_fields,
    reads_list,
    reads_numbers,
)
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply

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
    beyond_bytes: int


class TierCapacity:
    """The capacity of one tier, on the server that has its hash."""

    def __init__(self, domain: str) -> None:
        self._key = capacity_key(domain).encode()
        self._short = False

    def grow(self, transport: Transport, keyspace: str, bounds: SharedBounds, ledger: Grant, wanted: int) -> Change:
        """Grant `wanted` bytes as far as they are guaranteed or free."""
        change = self._change(transport, "grow", keyspace, ledger, wanted=wanted, **_bounds(bounds))
        self._short = self._short or change.beyond_bytes + (bounds.capacity_bytes or 0) // FREE_SHARE > 0
        return change

    def charge(self, transport: Transport, keyspace: str, bounds: SharedBounds, ledger: Grant) -> Change:
        """Record a scope's present guarantee and leases."""
        return self._change(transport, "charge", keyspace, ledger, **_bounds(bounds))

    def shrink(
        self, transport: Transport, keyspace: str, bounds: SharedBounds, granted: int, sequence: int, age_ms: int = 0
    ) -> None:
        """Lower a grant that its ledger knows to be lowered, unless it was changed since `sequence`. A scope in no
        policy that is charged nothing is forgotten; `age_ms` is the time since a policy had it, 0 if one has it.
        """
        self._change(
            transport, "shrink", keyspace, None, granted=granted, sequence=sequence, age_ms=age_ms, **_bounds(bounds)
        )

    def release(self, transport: Transport, keyspace: str, ledger: Grant, sequence: int, age_ms: int) -> int:
        """End the guarantee of a scope in no policy, unless it was changed since `sequence` (0: in any case); return
        the number of this change, 0 if it was.
        """
        return self._change(transport, "release", keyspace, ledger, sequence=sequence, age_ms=age_ms).sequence

    def unlisted(self, transport: Transport, cursor: int) -> tuple[int, list[UnlistedScope]]:
        """Take one step of a walk over all scopes; return the next cursor, 0 at the end, and those in no policy."""
        now = Command(self._key, (b"TIME",), read_moment_ms)
        step = (b"HSCAN", self._key, b"%d" % cursor, b"COUNT", b"%d" % SCOPES_PER_STEP)
        now_ms, (following, words) = transport.ask([now, Command(self._key, step, _read_step)])
        entries = ((read_text(name), entry) for name, entry in zip(words[::2], words[1::2], strict=True))
        scopes = [_unlisted(name, entry, now_ms) for name, entry in entries if is_keyspace(name)]
        return following, [one for one in scopes if one.age_ms >= STALE_MS]

    def take_short(self) -> bool:
        """Whether a scope that needed capacity found little left since the last call."""
        short, self._short = self._short, False
        return short

    def free(self, transport: Transport, capacity_bytes: int) -> int:
        """Return the bytes charged to no scope; negative if the tier is overcommitted."""
        ((charged,),) = transport.ask([Command(self._key, (b"HMGET", self._key, b"sum"), reads_fields(1))])
        return capacity_bytes - int(charged)

    def granted(self, transport: Transport, keyspaces: Iterable[str]) -> dict[str, int]:
        """Return the bytes granted to these scopes; one without an entry has none."""
        names = iter(keyspaces)
        granted: dict[str, int] = {}
        while batch := list(islice(names, MEMBERS_PER_COMMAND)):
            asked = (b"HMGET", self._key, *(name.encode() for name in batch))
            (entries,) = transport.ask([Command(self._key, asked, reads_list(len(batch)))])
            granted |= {name: _read_entry(one)[1] for name, one in zip(batch, entries, strict=True) if one is not None}
        return granted

    def tidy(self, transport: Transport) -> int:
        """Recompute the sum of all charges and end guarantees of scopes in no policy; return the difference found."""
        cursor, walk, begun = 0, 0, False
        while cursor or not begun:
            step = call(
                "tidy", self._key, reads_numbers(3), cursor=cursor, mine=walk, count=SCOPES_PER_STEP,
                stale_ms=STALE_MS, keep_ms=GRANT_KEEP_MS,
            )  # fmt: skip
            ((cursor, walk, drift),) = transport.ask([step])
            begun = True
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
        (answer,) = transport.ask(
            [call(script, self._key, reads_numbers(3), keyspace=keyspace.encode(), keep_ms=GRANT_KEEP_MS, **arguments)]
        )
        return Change(*answer)


def _bounds(bounds: SharedBounds) -> dict[str, int]:
    return {"guaranteed": bounds.kept_bytes, "capacity": bounds.capacity_bytes or 0}


def _read_entry(reply: Reply) -> tuple[int, int, int, int]:
    """Return guarantee, grant, last change and moment of a scope's entry."""
    parts = read_text(reply).split(":")
    if len(parts) < 4 or not all(part.isdigit() for part in parts[:4]):
        raise FramingError("the grant of a scope is malformed")
    guaranteed, granted, sequence, moment_ms = map(int, parts[:4])
    return guaranteed, granted, sequence, moment_ms


def _unlisted(keyspace: str, entry: Reply, now_ms: int) -> UnlistedScope:
    guaranteed, granted, sequence, moment_ms = _read_entry(entry)
    return UnlistedScope(keyspace, max(guaranteed, granted), sequence, now_ms - moment_ms)


def _read_step(reply: Reply) -> tuple[int, list[Reply]]:
    cursor, words = read_list(reply, 2)
    if not isinstance(words, list) or len(words) % 2:
        raise FramingError("a step through the grants is malformed")
    return read_number(cursor), words

"""Finds differences in a scope's accounting: of a bucket's index to its values, of its sums to the index, and of a
ledger's charges to the buckets' leases.

A writer that dies during a grant, or a server that falls back to an older copy, leaves a constant difference of leases;
a grant under way differs for a moment only. So the same difference at a second look a little later is a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from kvstrata_sidecar.adapter.redis.budget.scope_state import ScopeView
from kvstrata_sidecar.adapter.redis.client.commands import (
    Transport,
    call,
    read_list,
    read_number,
    read_numbers,
    read_text,
)
from kvstrata_sidecar.adapter.redis.client.resp import Reply

ENTRIES_PER_CALL = 256
RECOUNT_AT_ONCE = 1_000
"""Number of entries above which a bucket is recounted in steps: one script would block the server for too long."""

RECOUNT_STEP = 500


class Count(Protocol):
    def __call__(self, name: str, amount: int) -> None:
        """Add to a counter."""


def audit_bucket(transport: Transport, state: bytes, count: Count, *, encrypts: bool = False) -> None:
    """Remove entries without their value, and correct accounting that differs from the index.

    Where the tier `encrypts`, unencrypted blocks are deleted: an earlier tier left them on the server. A large bucket
    is recounted in steps; an unfinished recount continues with the next audit.
    """
    cursor, begun = 0, False
    while cursor or not begun:
        command = call(
            "audit", state, cursor, ENTRIES_PER_CALL, int(encrypts), read=lambda reply: read_numbers(reply, 4)
        )
        ((cursor, lost, lost_bytes, plain),) = transport.ask([command])
        begun = True
        count("drift_entries", lost)
        count("drift_bytes", lost_bytes)
        count("plaintext_removed", plain)
    for index in (b"x", b"a"):
        position = 0
        while position >= 0:
            step = call(
                "strays", state, index, position, ENTRIES_PER_CALL, read=lambda reply: read_numbers(reply, 2)
            )  # fmt: skip
            ((position, strays),) = transport.ask([step])
            count("drift_entries", strays)
    status = "more"
    while status == "more":
        command = call("recount", state, RECOUNT_AT_ONCE, RECOUNT_STEP, read=_read_recount)
        ((status, used, held, strays),) = transport.ask([command])
        count("drift_entries", strays)
        count("drift_bytes", abs(used) + abs(held))
    if status == "again":
        count("recounts_repeated", 1)


def _read_recount(reply: Reply) -> tuple[str, int, int, int]:
    status, used, held, strays = read_list(reply, 4)
    return read_text(status), read_number(used), read_number(held), read_number(strays)


LOOK_AGAIN_S = 2.0
"""Longer than a grant takes; a rebuild voids the grant of a writer that stalls longer."""


class LeaseDrift:
    """Remembers by how much scopes' leases differed at the last look. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._differed: dict[str, tuple[float, tuple[int, ...]]] = {}

    def found(self, keyspace: str, scope: ScopeView) -> bool:
        """Whether a bucket's lease differs from its charge by as much as at the look before."""
        _, before = self._differed.pop(keyspace, (0.0, ()))
        if scope.ledger.version == 0 or scope.ledger.void:
            return False
        differs = tuple(
            bucket.lease - charged for bucket, charged in zip(scope.buckets, scope.ledger.by_bucket, strict=True)
        )
        if any(now != 0 and now == then for now, then in zip(differs, before, strict=False)):
            return True
        if any(differs):
            self._differed[keyspace] = (self._clock() + LOOK_AGAIN_S, differs)
        return False

    def due(self) -> list[str]:
        """Return the scopes to look at again now."""
        now_s = self._clock()
        return [keyspace for keyspace, (at_s, _) in self._differed.items() if at_s <= now_s]

    def retain(self, keyspaces: Set[str]) -> None:
        for gone in self._differed.keys() - keyspaces:
            del self._differed[gone]

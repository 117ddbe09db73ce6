"""Compares a bucket's index with its values, and its accounting with the index; repairs differences."""

from __future__ import annotations

from typing import Protocol

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

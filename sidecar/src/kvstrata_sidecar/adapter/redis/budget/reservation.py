"""Reservations of blocks: a store reserves a block's bytes in its bucket before it writes the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.redis.client import commands as protocol
from kvstrata_sidecar.adapter.redis.client.commands import Place, Terms
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply

Outcome = Refusal | bool | Exception
"""Of a reservation: True if made, False if the block is present, else the refusal or error."""

OUTCOMES: dict[str, Outcome | None] = {"ok": True, "present": False, "tombstone": Refusal.TOMBSTONE, "short": None}


class Demand(NamedTuple):
    """A block that needs `size` bytes at a place, under a token that identifies its writer."""

    place: Place
    size: int
    token: bytes
    terms: Terms


class Reserved(NamedTuple):
    """Outcome, None if the lease is short of `missing_bytes`; and the evicted blocks with their ages."""

    outcome: Outcome | None
    missing_bytes: int
    evicted: int
    evicted_bytes: int
    ages_ms: Sequence[int]


def reservation(demand: Demand, window_ms: int, evict_before_ms: int = 0, passed_ms: int = 0) -> Command:
    """Return the command that reserves a block `passed_ms` after its demand, evicting blocks last used before
    `evict_before_ms` if needed. Answers Reserved."""
    place, size, token, terms = demand
    return protocol.call(
        "reserve", protocol.state_key(place.base), _read_reserved, member=place.member, size=size, token=token,
        window_ms=window_ms, keep_ms=terms.keep_ms, life_ms=terms.life_ms, limited=terms.bounds is not None,
        evict_before_ms=evict_before_ms, encrypts=terms.encrypts, age_ms=terms.age_ms + passed_ms,
    )  # fmt: skip


def _read_reserved(reply: Reply) -> Reserved:
    status, *sizes, ages = protocol.read_list(reply, 5)
    if (name := protocol.read_text(status)) not in OUTCOMES:
        raise FramingError("a reservation was not answered as it can be")
    missing, evicted, evicted_bytes = map(protocol.read_number, sizes)
    return Reserved(OUTCOMES[name], missing, evicted, evicted_bytes, protocol.read_ages(ages))

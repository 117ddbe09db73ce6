"""Steps of a sweep over a scope's buckets: remove expired entries, shorten lives."""

from __future__ import annotations

from collections.abc import Sequence

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


def expire(transport: Transport, states: Sequence[bytes]) -> tuple[int, int]:
    """Remove expired blocks and dead writers' reservations; return how many of each."""
    all_expired = all_dead = 0
    steps = [(state, 0) for state in states]
    while steps:
        commands = [
            call("sweep", state, ENTRIES_PER_CALL, cursor, read=lambda reply: read_numbers(reply, 4))
            for state, cursor in steps
        ]
        answers = transport.ask(commands)
        all_expired += sum(expired for expired, *_ in answers)
        all_dead += sum(dead for _, dead, *_ in answers)
        told = zip(steps, answers, strict=True)
        steps = [(state, cursor) for (state, _), (_, _, more, cursor) in told if more or cursor]
    return all_expired, all_dead


def clamp(transport: Transport, states: Sequence[bytes], life_ms: int) -> None:
    steps = [(state, 0, 0) for state in states]
    while steps:
        commands = [
            call("clamp", state, life_ms, since, cursor, ENTRIES_PER_CALL, read=_read_clamp)
            for state, cursor, since in steps
        ]
        answers = zip(steps, transport.ask(commands), strict=True)
        steps = [(step[0], cursor, since) for step, (status, cursor, since) in answers if status != "done"]


def _read_clamp(reply: Reply) -> tuple[str, int, int]:
    status, cursor, since = read_list(reply, 3)
    return read_text(status), read_number(cursor), read_number(since)

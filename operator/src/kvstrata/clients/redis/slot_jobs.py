"""Moves slots at one instant, as Valkey 9 can: the source does the work, and is watched.

A job that fails leaves the slots where they are. One that hangs, because its target froze, is given up, and with it all
others of the same source, which the server does not tell apart; they are begun again by the next look.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from redis import exceptions

from kvstrata.clients.redis.connection import ServerLine, Word
from kvstrata.clients.redis.slot_moves import MoveFailedError, MoveReason, Tally, Told
from kvstrata.model.redis.cluster import SlotRange

POLL_S = 0.1
HANGS_AFTER_S = 15.0
"""A job that shows no progress for so long: a target that lives acknowledges each second."""

_OVER = {"success", "failed", "cancelled"}


async def move_at_once(
    source: ServerLine,
    target: str,
    slots: Sequence[SlotRange],
    *,
    tally: Tally,
    told: Told,
    pause: Callable[[float], Awaitable[None]],
) -> None:
    """Have slots moved, or watch the job that moves them already. Raises MoveFailedError if it does not succeed."""
    wanted = " ".join(f"{first}-{last}" for first, last in slots)
    name = await _under_way(source, target, wanted)
    if name is None:
        words: Sequence[Word] = (*(bound for one in slots for bound in one), "NODE", target)
        before = {job["name"] for job in await _jobs(source)}
        try:
            await source.one("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", *words)
        except exceptions.ResponseError as error:
            raise MoveFailedError(MoveReason.REFUSED, f"{source.name}: CLUSTER MIGRATESLOTS: {error}") from None
        name = next((job["name"] for job in await _jobs(source) if job["name"] not in before), None)
    seen, seen_at_s = "", time.monotonic()
    while True:
        job = next((one for one in await _jobs(source) if one["name"] == name), None)
        if job is None:
            raise MoveFailedError(MoveReason.JOB_FAILED, f"{source.name} forgot the move of slots {wanted}")
        if job["state"] in _OVER:
            break
        shown = str(sorted(job.items()))
        if shown != seen:
            seen, seen_at_s = shown, time.monotonic()
        elif time.monotonic() - seen_at_s > HANGS_AFTER_S:
            await source.one("CLUSTER", "CANCELSLOTMIGRATIONS")
            message = f"{source.name}: the move of slots {wanted} hung ({job['state']}) and was given up"
            raise MoveFailedError(MoveReason.JOB_HUNG, message)
        await pause(POLL_S)
    if job["state"] != "success":
        message = f"{source.name}: the move of slots {wanted} {job['state']}: {job['message'] or 'no reason given'}"
        raise MoveFailedError(MoveReason.JOB_FAILED, message)
    tally.slots += sum(last - first + 1 for first, last in slots)
    told(tally)


async def _under_way(source: ServerLine, target: str, slots: str) -> str | None:
    jobs = (job for job in await _jobs(source) if job["operation"] == "EXPORT" and job["state"] not in _OVER)
    return next((job["name"] for job in jobs if (job["slot_ranges"], job["target_node"]) == (slots, target)), None)


async def _jobs(source: ServerLine) -> list[Mapping[str, str]]:
    """The jobs that a server knows of, the newest first."""
    return [_fields(entry) for entry in await source.one("CLUSTER", "GETSLOTMIGRATIONS")]


def _fields(entry: Any) -> Mapping[str, str]:
    pairs = entry.items() if isinstance(entry, Mapping) else zip(entry[::2], entry[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)

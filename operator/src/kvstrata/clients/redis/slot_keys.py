"""Moves slots key by key, as Redis 7 and 8 need it, drops their content, or cleans up after a failed move.

A slot is opened and its indexes moved atomically (MULTI): a script that meets half a bucket would fail between two of
its writes. From then on the source redirects every script; the adapter refuses stores into the slot and reads at both
ends. A write in progress loses its block, which expires within 30 s. Nothing new enters the slot until first the
target, then the source, own it as the target's.

After an interruption, the same order continues: the whole index of a bucket is either at the source or at the target
(`#s` records where). If a failover forgot that the slot was open, both may have one; such a bucket is deleted at both
ends, because its values cannot be distinguished. Values without an index anywhere are deleted, too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import exceptions

from kvstrata.clients.redis.connection import Argument, ServerAwayError, ServerLine
from kvstrata.clients.redis.key_names import batches, by_bucket, sorted_out, state_of, whole_buckets, without_index
from kvstrata.clients.redis.move_report import MoveFailedError, MoveReason, MoveStats, OnProgress
from kvstrata.contract.store.redis_scripts import script

BATCH_BYTES = 1 << 20
"""Bytes per MIGRATE, unless one key is larger. The source blocks meanwhile, so this delays the slowest small
command: 1 MiB takes milliseconds, 4 MiB tens of them, too many for a p99 below 25 ms. Smaller batches block as long
in sum."""

BATCH_KEYS = 128
PAUSE = 2.0
"""Pause after a MIGRATE, as a multiple of its duration. Other clients get two thirds of the source's time, so a
source that was half busy keeps up."""

LONGEST_PAUSE_S = 0.5
EMPTY_AT_ONCE = 64
KEYS_AT_ONCE = 256
"""Small commands per pipeline."""

MIGRATE_TIMEOUT_MS = 1000
"""How long a source, which blocks meanwhile, waits for a target that does not answer."""

MIGRATE_ANSWER_S = 15.0
ROUNDS = 20

Pause = Callable[[float], Awaitable[None]]
Credentials = Callable[[], tuple[str, str] | None]
"""User and password with which a source logs in to its target."""


@dataclass(frozen=True, slots=True)
class Ends:
    """`address` is the target's as the source reaches it; `others` are the other primaries."""

    source: ServerLine
    target: ServerLine
    others: Sequence[ServerLine]
    address: tuple[str, int]


class KeyMover:
    """Moves slots between two servers. `open_slots` are already migrating at the source."""

    def __init__(
        self,
        ends: Ends,
        *,
        open_slots: Iterable[int],
        movable_bytes: int,
        drops: bool,
        credentials: Credentials,
        tally: MoveStats,
        on_progress: OnProgress,
        pause: Pause,
    ) -> None:
        self._source, self._target, self._others = ends.source, ends.target, ends.others
        self._address = ends.address
        self._open = set(open_slots)
        self._movable_bytes = movable_bytes
        self._drops = drops
        self._credentials = credentials
        self._tally = tally
        self._on_progress = on_progress
        self._pause = pause

    async def move(self, slots: Sequence[int]) -> None:
        for start in range(0, len(slots), EMPTY_AT_ONCE):
            group = slots[start : start + EMPTY_AT_ONCE]
            here, there = await self._count(self._source, group), await self._count(self._target, group)
            empty = [slot for slot in group if not here[slot] and not there[slot]]
            await self._open_target(empty)
            await _all_right(self._source, [_set_slot(slot, "MIGRATING", self._target.node_id) for slot in empty])
            came = await self._count(self._source, empty)
            self._open |= set(empty)
            await self._hand_over([slot for slot in empty if not came[slot]])
            for slot in group:
                if slot not in came or came[slot]:
                    await self._move_one(slot, leftovers=there[slot])
            await self._inform_others(group)

    async def close(self, slots: Sequence[int]) -> None:
        """Leave slots at the source; delete leftovers at other primaries, and broken buckets."""
        for other in self._others:
            try:
                await self._clear(other, slots)
            except ServerAwayError:
                continue
        for slot in slots:
            names = await _names(self._source, slot, await self._count_one(slot))
            self._tally.orphans += len(await self._unlink(slot, without_index(names, whole_buckets(names))))
            await _all_right(self._source, [_set_slot(slot, "STABLE")])
            self._tally.slots += 1
            self._on_progress(self._tally)

    async def _clear(self, server: ServerLine, slots: Sequence[int]) -> None:
        for slot, count in (await self._count(server, slots)).items():
            await _all_right(server, [_set_slot(slot, "IMPORTING", self._source.node_id)] if count else [])
            await self._drop_at(server, await _names(server, slot, count))
            await _all_right(server, [_set_slot(slot, "STABLE")])

    async def _move_one(self, slot: int, leftovers: int) -> None:
        await self._open_target([slot])
        there = await _names(self._target, slot, leftovers)
        buckets = whole_buckets(there)
        has_room = await self._open_source(slot, there, buckets) or self._drops
        if not has_room:
            await self._drop_at(
                self._target, await _names(self._target, slot, await self._count_one(slot, self._target))
            )
        for _ in range(ROUNDS):
            names = await _names(self._source, slot, await self._count_one(slot))
            if not names:
                await self._hand_over([slot])
                return
            if self._drops or not has_room:
                await self._drop(slot, names)
                continue
            index, values = sorted_out(names)
            if index:
                await self._migrate(slot, index)
                buckets |= whole_buckets(index)
            orphans = set(without_index(values, buckets))
            self._tally.orphans += len(await self._unlink(slot, sorted(orphans)))
            await self._move_values(slot, [name for name in values if name not in orphans])
        raise MoveFailedError(MoveReason.NOT_TRANSFERRED, f"slot {slot}: keys stay at {self._source.name}")

    async def _open_target(self, slots: Sequence[int]) -> None:
        await _all_right(self._target, [_set_slot(slot, "IMPORTING", self._source.node_id) for slot in slots])

    async def _open_source(self, slot: int, there: Sequence[bytes], buckets: set[bytes]) -> bool:
        """Open a slot at the source and atomically remove the state that scripts start from; return whether there
        was room. `there` are the target's keys. `buckets`, those of which the target has the index, is updated in
        place."""
        names = await _names(self._source, slot, await self._count_one(slot))
        disputed = set() if slot in self._open else buckets & whole_buckets(names)
        buckets -= disputed
        if slot not in self._open:
            await self._drop_at(self._target, without_index(there, buckets))
        doomed = [name for name in names if not _outside(name, disputed)]
        index, _ = sorted_out(name for name in names if _outside(name, disputed))
        work: list[Sequence[Argument]] = [_set_slot(slot, "MIGRATING", self._target.node_id)]
        removed = doomed + index if self._drops else doomed
        if removed:
            work.append(("UNLINK", *removed))
        if index and not self._drops:
            work.append(self._migration(index))
        started_s = time.monotonic()
        *_, outcome = await self._source.ask([("MULTI",), *work, ("EXEC",)], MIGRATE_ANSWER_S)
        for answer in outcome if isinstance(outcome, list) else [outcome]:
            if _is_full(answer):
                return False
            self._check(slot, answer)
        self._open.add(slot)
        self._tally.orphans += len(doomed)
        if self._drops:
            self._tally.dropped += len(index)
        else:
            buckets |= whole_buckets(index)
            self._tally.keys += len(index)
        await self._pause_after(started_s)
        return True

    async def _move_values(self, slot: int, names: Sequence[bytes]) -> None:
        sizes: dict[bytes, int] = {}
        for part in _parts(names):
            answers = await self._source.ask([("STRLEN", name) for name in part])
            # STRLEN of an expired key is redirected, yet the key counts as present until it is touched: migrate it,
            # too.
            sizes |= {name: size if isinstance(size, int) else 0 for name, size in zip(part, answers, strict=True)}
        large = {name: size for name, size in sizes.items() if size > self._movable_bytes}
        await self._drop_values(slot, large)
        movable = {name: size for name, size in sizes.items() if name not in large}
        for batch in batches(movable, BATCH_BYTES, BATCH_KEYS):
            left: set[bytes] = set()
            if not await self._migrate(slot, batch):
                left = await self._drop_values(slot, {name: movable[name] for name in batch})
                self._tally.keys += len(batch) - len(left)
            self._tally.bytes += sum(movable[name] for name in batch if name not in left)
            self._on_progress(self._tally)

    async def _migrate(self, slot: int, names: Sequence[bytes]) -> bool:
        """Move keys in one command; return whether the target had room."""
        started_s = time.monotonic()
        (answer,) = await self._source.ask([self._migration(names)], MIGRATE_ANSWER_S)
        if _is_full(answer):
            return False
        self._check(slot, answer)
        self._tally.keys += len(names)
        await self._pause_after(started_s)
        return True

    def _migration(self, names: Sequence[bytes]) -> Sequence[Argument]:
        host, port = self._address
        known = self._credentials()
        return (
            *("MIGRATE", host, port, "", 0, MIGRATE_TIMEOUT_MS, "REPLACE"),
            *(() if known is None else ("AUTH2", *known)),
            *("KEYS", *names),
        )

    async def _drop_values(self, slot: int, sizes: Mapping[bytes, int]) -> set[bytes]:
        """Delete values at the source, and remove them from their index, which is at the target by now."""
        removed = await self._drop(slot, list(sizes))
        discard = script("discard").text
        for bucket, members in by_bucket(removed).items():
            for part in _parts(members):
                commands: list[Sequence[Argument]] = [("ASKING",), ("EVAL", discard, 1, state_of(bucket), *part)]
                *_, answer = await self._target.ask(commands)
                if isinstance(answer, Exception):
                    raise MoveFailedError(MoveReason.REFUSED, f"{self._target.name}: {answer}")
        return removed

    async def _drop(self, slot: int, names: Sequence[bytes]) -> set[bytes]:
        removed = await self._unlink(slot, names)
        self._tally.dropped += len(removed)
        self._on_progress(self._tally)
        return removed

    async def _unlink(self, slot: int, names: Sequence[bytes]) -> set[bytes]:
        """Delete keys of a slot at the source; return those that were there."""
        removed: set[bytes] = set()
        for part in _parts(names):
            answers = await self._source.ask([("UNLINK", name) for name in part])
            expired = [
                name for name, answer in zip(part, answers, strict=True) if isinstance(answer, exceptions.AskError)
            ]
            for answer in answers:
                if not isinstance(answer, exceptions.AskError):
                    self._check(slot, answer)
            # Only a command that is not redirected touches expired keys of an open slot.
            if expired and slot in self._open:
                await self._migrate(slot, expired)
            removed |= set(part) - set(expired)
        return removed

    async def _drop_at(self, server: ServerLine, names: Sequence[bytes]) -> None:
        for part in _parts(names):
            commands = [command for name in part for command in (("ASKING",), ("UNLINK", name))]
            for answer in await server.ask(commands):
                if isinstance(answer, Exception):
                    raise MoveFailedError(MoveReason.REFUSED, f"{server.name}: {answer}")
            self._tally.orphans += len(part)

    async def _hand_over(self, slots: Sequence[int]) -> None:
        """Assign slots to the target, at the target first and then at the source."""
        for server in (self._target, self._source):
            await _all_right(server, [_set_slot(slot, "NODE", self._target.node_id) for slot in slots])
        self._tally.slots += len(slots)
        self._on_progress(self._tally)

    async def _inform_others(self, slots: Sequence[int]) -> None:
        """Inform the other primaries at once, instead of waiting for gossip."""
        for other in self._others:
            try:
                await other.ask([_set_slot(slot, "NODE", self._target.node_id) for slot in slots])
            except ServerAwayError:
                continue

    async def _pause_after(self, started_s: float) -> None:
        await self._pause(min(LONGEST_PAUSE_S, PAUSE * (time.monotonic() - started_s)))

    async def _count(self, server: ServerLine, slots: Sequence[int]) -> Mapping[int, int]:
        answers = await _all_right(server, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in slots])
        return dict(zip(slots, answers, strict=True))

    async def _count_one(self, slot: int, server: ServerLine | None = None) -> int:
        return (await self._count(server or self._source, [slot]))[slot]

    def _check(self, slot: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            known = self._credentials()
            detail = str(answer) if known is None else str(answer).replace(known[1], "…")
            message = f"slot {slot} from {self._source.name} to {self._target.name}: {detail}"
            raise MoveFailedError(MoveReason.NOT_TRANSFERRED, message)


def _set_slot(slot: int, *words: str) -> Sequence[Argument]:
    return ("CLUSTER", "SETSLOT", slot, *words)


async def _all_right(server: ServerLine, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """Send commands in one pipeline; raises MoveFailedError for the first error."""
    answers = await server.ask(commands)
    for command, answer in zip(commands, answers, strict=True):
        if isinstance(answer, Exception):
            shown = " ".join(str(word) for word in command[:4])
            raise MoveFailedError(MoveReason.REFUSED, f"{server.name}: {shown}: {answer}")
    return answers


async def _names(server: ServerLine, slot: int, count: int) -> list[bytes]:
    """All keys of a slot; Redis cannot page through them."""
    if not count:
        return []
    names = await server.one("CLUSTER", "GETKEYSINSLOT", slot, count + KEYS_AT_ONCE, timeout_s=MIGRATE_ANSWER_S)
    return list(names)


def _is_full(answer: Any) -> bool:
    return isinstance(answer, Exception) and "OOM" in str(answer)


def _outside(name: bytes, buckets: set[bytes]) -> bool:
    return not by_bucket([name]).keys() & buckets


def _parts(names: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    return (names[start : start + KEYS_AT_ONCE] for start in range(0, len(names), KEYS_AT_ONCE))

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis import exceptions

from kvstrata.clients.redis import key_names
from kvstrata.clients.redis.connection import MoveFailedError, ServerAwayError, ServerLine
from kvstrata.clients.redis.key_names import by_bucket, parts, whole_buckets, without_index
from kvstrata.clients.redis.probe import Argument
from kvstrata.contract.store.redis_scripts import script
from kvstrata.plan.redis.topology.steps import MoveOrder

BATCH_BYTES = 1 << 20
"""Bytes per MIGRATE, unless one key is larger. The source blocks meanwhile: 1 MiB takes milliseconds, 4 MiB tens of
them, too many for a p99 below 25 ms of small commands. Smaller batches block as long in sum."""

BATCH_KEYS = 128
PAUSE = 2.0
"""Pause after a MIGRATE, as a multiple of its duration: other clients get two thirds of the source's time."""

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

OnProgress = Callable[[int, int], None]
"""Gets the number of slots that moved or were closed, and of values that were dropped, since its last call. Values are
dropped that are too large, without room at the target, or meant to be; each is a miss for readers."""


@dataclass(slots=True)
class KeyMover:
    """Moves slots between two servers. `address` is the target's for the source, `others` are the other primaries,
    `open_slots` are already migrating at the source."""

    source: ServerLine
    target: ServerLine
    others: Sequence[ServerLine]
    address: tuple[str, int]
    open_slots: set[int]
    order: MoveOrder
    credentials: Credentials
    on_progress: OnProgress
    pause: Pause

    async def move(self, slots: Sequence[int]) -> None:
        for group in parts(slots, EMPTY_AT_ONCE):
            here, there = await self._count(self.source, group), await self._count(self.target, group)
            empty = [slot for slot in group if not here[slot] and not there[slot]]
            await _set(self.target, empty, "IMPORTING", self.source.node_id)
            await _set(self.source, empty, "MIGRATING", self.target.node_id)
            came = await self._count(self.source, empty)
            self.open_slots |= set(empty)
            await self._hand_over([slot for slot in empty if not came[slot]])
            for slot in group:
                if slot not in came or came[slot]:
                    await self._move_one(slot, leftovers=there[slot])
            await self._inform_others(group)

    async def close(self, slots: Sequence[int]) -> None:
        """Leave slots at the source; delete leftovers at other primaries, and broken buckets."""
        for other in self.others:
            with suppress(ServerAwayError):
                await self._clear(other, slots)
        for slot in slots:
            names = await _names(self.source, slot, await self._count_one(slot))
            await self._unlink(slot, without_index(names, whole_buckets(names)))
            await _set(self.source, [slot], "STABLE")
            self.on_progress(1, 0)

    async def _clear(self, server: ServerLine, slots: Sequence[int]) -> None:
        for slot, count in (await self._count(server, slots)).items():
            await _set(server, [slot] if count else [], "IMPORTING", self.source.node_id)
            await self._drop_at(server, await _names(server, slot, count))
            await _set(server, [slot], "STABLE")

    async def _move_one(self, slot: int, leftovers: int) -> None:
        await _set(self.target, [slot], "IMPORTING", self.source.node_id)
        there = await _names(self.target, slot, leftovers)
        buckets = whole_buckets(there)
        has_room = await self._open_source(slot, there, buckets) or self.order.drops
        if not has_room:
            await self._drop_at(self.target, await _names(self.target, slot, await self._count_one(slot, self.target)))
        for _ in range(ROUNDS):
            names = await _names(self.source, slot, await self._count_one(slot))
            if not names:
                await self._hand_over([slot])
                return
            if self.order.drops or not has_room:
                await self._drop(slot, names)
                continue
            index, values = key_names.sorted_out(names)
            if index:
                await self._migrate(slot, index)
                buckets |= whole_buckets(index)
            orphans = set(without_index(values, buckets))
            await self._unlink(slot, sorted(orphans))
            await self._move_values(slot, [name for name in values if name not in orphans])
        raise MoveFailedError(f"slot {slot}: keys stay at {self.source.name}")

    async def _open_source(self, slot: int, there: Sequence[bytes], buckets: set[bytes]) -> bool:
        """Open a slot at the source and atomically remove the state that scripts start from; return whether there
        was room. `there` are the target's keys; `buckets`, those whose index it has, is updated in place."""
        names = await _names(self.source, slot, await self._count_one(slot))
        disputed = set() if slot in self.open_slots else buckets & whole_buckets(names)
        buckets -= disputed
        if slot not in self.open_slots:
            await self._drop_at(self.target, without_index(there, buckets))
        doomed = [name for name in names if not _outside(name, disputed)]
        index, _ = key_names.sorted_out(name for name in names if _outside(name, disputed))
        work: list[Sequence[Argument]] = [_set_slot(slot, "MIGRATING", self.target.node_id)]
        removed = doomed + index if self.order.drops else doomed
        if removed:
            work.append(("UNLINK", *removed))
        if index and not self.order.drops:
            work.append(self._migration(index))
        started_s = time.monotonic()
        *_, outcome = await self.source.ask([("MULTI",), *work, ("EXEC",)], MIGRATE_ANSWER_S)
        for answer in outcome if isinstance(outcome, list) else [outcome]:
            if _is_full(answer):
                return False
            self._check(slot, answer)
        self.open_slots.add(slot)
        if self.order.drops:
            self.on_progress(0, len(index))
        else:
            buckets |= whole_buckets(index)
        await self._pause_after(started_s)
        return True

    async def _move_values(self, slot: int, names: Sequence[bytes]) -> None:
        sizes: dict[bytes, int] = {}
        for part in parts(names, KEYS_AT_ONCE):
            answers = await self.source.ask([("STRLEN", name) for name in part])
            # STRLEN of an expired key is redirected, yet the key counts as present until it is touched: migrate it,
            # too.
            sizes |= {name: size if isinstance(size, int) else 0 for name, size in zip(part, answers, strict=True)}
        large = {name: size for name, size in sizes.items() if size > self.order.movable_bytes}
        await self._drop_values(slot, [*large])
        movable = {name: size for name, size in sizes.items() if name not in large}
        for batch in key_names.batches(movable, BATCH_BYTES, BATCH_KEYS):
            if not await self._migrate(slot, batch):
                await self._drop_values(slot, batch)

    async def _migrate(self, slot: int, names: Sequence[bytes]) -> bool:
        """Move keys in one command; return whether the target had room."""
        started_s = time.monotonic()
        (answer,) = await self.source.ask([self._migration(names)], MIGRATE_ANSWER_S)
        if _is_full(answer):
            return False
        self._check(slot, answer)
        await self._pause_after(started_s)
        return True

    def _migration(self, names: Sequence[bytes]) -> Sequence[Argument]:
        host, port = self.address
        known = self.credentials()
        return (
            *("MIGRATE", host, port, "", 0, MIGRATE_TIMEOUT_MS, "REPLACE"),
            *(() if known is None else ("AUTH2", *known)),
            *("KEYS", *names),
        )

    async def _drop_values(self, slot: int, names: Sequence[bytes]) -> None:
        """Delete values at the source, and remove them from their index, which is at the target by now."""
        removed = await self._drop(slot, names)
        discard = script("discard").text
        for bucket, members in by_bucket(removed).items():
            state = key_names.state_of(bucket)
            for part in parts(members, KEYS_AT_ONCE):
                *_, answer = await self.target.ask([("ASKING",), ("EVAL", discard, 1, state, *part)])
                if isinstance(answer, Exception):
                    raise MoveFailedError(f"{self.target.name}: {answer}")

    async def _drop(self, slot: int, names: Sequence[bytes]) -> set[bytes]:
        removed = await self._unlink(slot, names)
        self.on_progress(0, len(removed))
        return removed

    async def _unlink(self, slot: int, names: Sequence[bytes]) -> set[bytes]:
        """Delete keys of a slot at the source; return those that were there."""
        removed: set[bytes] = set()
        for part in parts(names, KEYS_AT_ONCE):
            answers = await self.source.ask([("UNLINK", name) for name in part])
            expired = list[bytes]()
            for name, answer in zip(part, answers, strict=True):
                if isinstance(answer, exceptions.AskError):
                    expired.append(name)
                else:
                    self._check(slot, answer)
            # Only a command that is not redirected touches expired keys of an open slot.
            if expired and slot in self.open_slots:
                await self._migrate(slot, expired)
            removed |= set(part) - set(expired)
        return removed

    async def _drop_at(self, server: ServerLine, names: Sequence[bytes]) -> None:
        for part in parts(names, KEYS_AT_ONCE):
            commands = [command for name in part for command in (("ASKING",), ("UNLINK", name))]
            for answer in await server.ask(commands):
                if isinstance(answer, Exception):
                    raise MoveFailedError(f"{server.name}: {answer}")

    async def _hand_over(self, slots: Sequence[int]) -> None:
        """Assign slots to the target, at the target first and then at the source."""
        for server in (self.target, self.source):
            await _set(server, slots, "NODE", self.target.node_id)
        self.on_progress(len(slots), 0)

    async def _inform_others(self, slots: Sequence[int]) -> None:
        """Inform the other primaries at once, instead of waiting for gossip."""
        for other in self.others:
            with suppress(ServerAwayError):
                await other.ask([_set_slot(slot, "NODE", self.target.node_id) for slot in slots])

    async def _pause_after(self, started_s: float) -> None:
        await self.pause(min(LONGEST_PAUSE_S, PAUSE * (time.monotonic() - started_s)))

    async def _count(self, server: ServerLine, slots: Sequence[int]) -> Mapping[int, int]:
        answers = await _all_right(server, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in slots])
        return dict(zip(slots, answers, strict=True))

    async def _count_one(self, slot: int, server: ServerLine | None = None) -> int:
        return (await self._count(server or self.source, [slot]))[slot]

    def _check(self, slot: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            known = self.credentials()
            detail = str(answer) if known is None else str(answer).replace(known[1], "…")
            raise MoveFailedError(f"slot {slot} from {self.source.name} to {self.target.name}: {detail}")


def _set_slot(slot: int, *words: str) -> Sequence[Argument]:
    return ("CLUSTER", "SETSLOT", slot, *words)


async def _set(server: ServerLine, slots: Sequence[int], *words: str) -> None:
    await _all_right(server, [_set_slot(slot, *words) for slot in slots])


async def _all_right(server: ServerLine, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """Send commands in one pipeline; raises MoveFailedError for the first error."""
    answers = await server.ask(commands)
    for command, answer in zip(commands, answers, strict=True):
        if isinstance(answer, Exception):
            shown = " ".join(str(word) for word in command[:4])
            raise MoveFailedError(f"{server.name}: {shown}: {answer}")
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

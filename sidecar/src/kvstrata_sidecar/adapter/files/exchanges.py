"""Parts of tasks on files: store, load, remove."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstrata.contract.store.block_file import block_name, file_bytes, file_name, keyspace_of
from kvstrata.contract.store.block_value import HEADER_BYTES
from kvstrata_sidecar.adapter.files.disk import SPARES, Clocks, Disk
from kvstrata_sidecar.adapter.files.file_format import Pages, Verdict, unread
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.files.health import DiskError, Fault, Health, TooLateError
from kvstrata_sidecar.adapter.files.space import Reservation, Spare, Victim
from kvstrata_sidecar.adapter.index import Cause
from kvstrata_sidecar.adapter.params import FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.counts import EVICTION
from kvstrata_sidecar.adapter.tier.tasks import BlocksPart, Deps, Gain, Lent, QuestionPart

CLAIM_TIMEOUT_S = 5.0
"""How long a store waits for removals by others before it gives up its file."""

STALL_S = 1.0
"""An operation that takes this long after its task ended counts as a hanging disk."""


@dataclass(frozen=True, slots=True)
class Files(Deps[FileTierParams, bytes]):
    """Dependencies of all work on one directory. Each worker makes its own pages; `pages` are for refusals only."""

    disk: Disk
    index: FileIndex
    health: Health
    clocks: Clocks
    spans: Spans
    make_pages: Callable[[], Pages]
    pages: Pages

    def keyspace_at(self, place: bytes) -> str:
        return keyspace_of(place)

    def refusal(self, keyspace: str, *, storing: bool = False) -> Refusal | None:
        return (
            self.enforcement.refusal(keyspace, tier=self.tier.name)
            or self.pages.refusal(keyspace)
            or self.health.refusal(storing=storing)
        )

    def name(self, key: bytes) -> str:
        return file_name(key, encrypted=self.tier.encrypts)

    def remove(self, key: bytes, *, erasing: bool = False) -> str:
        """Remove the file of a block taken out of the index; return the error, empty for none. It is retried later."""
        try:
            self.unlink(keyspace_of(key), self.name(key), erasing=erasing)
        except DiskError as error:
            self.health.failed(error)
            self.index.stranded(key)
            return str(error)
        self.index.gone(key)
        return ""

    def removal(self, keyspace: str, keys: list[bytes], counter: str = "") -> QuestionPart[Hands, bytes, list[bytes]]:
        """Return the part that removes blocks of one keyspace. It answers those that existed; `counter` counts them."""

        def remove(_: Hands, keys: Sequence[bytes]) -> list[bytes]:
            removed = self.index.take_unused(keys)
            for key in removed:
                self.remove(key)
            if counter:
                self.counters.add(counter, len(removed), keyspace)
            return removed

        return QuestionPart(keyspace, keys, remove, self.counters)

    def discard(self, spare: Spare, *, erasing: bool = False) -> str:
        """Remove a spare; return the error, empty for none."""
        try:
            self.unlink(SPARES, spare.name, erasing=erasing)
        except DiskError as error:
            self.health.failed(error)
            self.index.spare_gone(spare, removed=False)
            return str(error)
        self.index.spare_gone(spare)
        return ""

    def unlink(self, keyspace: str, name: str, *, erasing: bool, disk: Disk | None = None) -> None:
        """Remove a file, from `disk` if given; when `erasing`, overwrite a plain one first."""
        disk = disk or self.disk
        if erasing and not self.tier.encrypts:
            disk.overwrite(keyspace, name)
        disk.unlink(keyspace, name)

    def evict(self, victims: Mapping[bytes, Victim], spare_bytes: int = 0) -> None:
        """Remove and count evicted blocks. Files of `spare_bytes` that made room become spares."""
        for key, victim in victims.items():
            keyspace = keyspace_of(key)
            scope = keyspace if self.index.bounds(keyspace) is not None else ""
            if victim.cause is Cause.RETENTION:
                self.counters.add("expired", 1, scope)
            else:
                self.counters.add_all(scope, evicted=1, evicted_bytes=victim.size_bytes)
                self.counters.age(EVICTION, self.clocks.now_s() - victim.computed_s)
            if victim.size_bytes == spare_bytes and victim.cause is not Cause.RETENTION:
                self._spare(key)
            else:
                self.remove(key)

    def _spare(self, key: bytes) -> None:
        name = f".{secrets.token_hex(8)}"
        try:
            there = self.disk.spare(keyspace_of(key), self.name(key), name)
        except DiskError as error:
            self.health.failed(error)
            self.index.stranded(key)
        else:
            self.index.gone(key, name if there else None)


class Hands:
    """One worker's pages, and the start of its current operation."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.pages = files.make_pages()
        self._since_s = 0.0

    def renew(self) -> None:
        self._since_s = self.files.clocks.now_s()

    def abort(self, why: str = "") -> None:
        """A disk operation cannot be interrupted; report a stall if it takes too long."""
        if why and self.files.clocks.now_s() - self._since_s >= STALL_S:
            self.files.health.breaker.failed(why, fatal=True)

    def close(self) -> None:
        self.pages.wipe()


@dataclass(slots=True, eq=False)
class LoadPart(BlocksPart[Hands, bytes, Files]):
    urgent: bool = True

    def run(self, hands: Hands, gain: Gain) -> None:
        counters = self.deps.counters
        while self.blocks and not self.task.is_over:
            one, *self.blocks = self.blocks
            hands.renew()
            kept = keyspace_of(one.place)
            refusal = hands.pages.refusal(kept)
            if refusal is not None:
                counters.refuse(refusal, 1, kept)
            elif (age_s := self._load(hands, one, kept)) is not None:
                self.loaded(one, gain, age_s)
            else:
                counters.add("load_misses")

    def _load(self, hands: Hands, one: Lent[bytes], keyspace: str) -> float | None:
        """Load one block; return the age of its tokens, None for a miss."""
        files, pages = self.deps, hands.pages
        kept = files.index.begin_read(one.place)
        if kept is None:
            return None
        verdict = Verdict.FOREIGN
        try:
            with files.spans.held(one.view):
                if self.task.is_over:  # checked after the memory is held, and so held back when freed
                    return None
                try:
                    file, name = files.name(one.place), block_name(files.params.domain, one.place)
                    whole = files.disk.read(keyspace, file, pages.room(one.view))
                    if self.task.is_over:
                        return None
                    if whole:
                        verdict = pages.open(keyspace, name, one.view)
                    else:  # another codec's files have other lengths
                        verdict = unread(name, files.disk.end(keyspace, file, HEADER_BYTES))
                finally:
                    pages.wipe()
            files.health.breaker.succeeded()
        except DiskError as error:
            verdict = Verdict.DAMAGED
            files.health.failed(error)
            if error.fault is not Fault.MISSING:
                files.counters.add("errors")
        finally:
            files.index.end_read(one.place)
        if verdict is Verdict.GOOD:
            return max(0.0, files.clocks.now_s() - kept.computed_s)
        if verdict is Verdict.LATER:
            files.index.leave(one.place)
        if verdict is Verdict.DAMAGED:
            files.counters.add("unreadable")
            if files.index.drop(one.place):
                files.remove(one.place)
        return None


@dataclass(slots=True, eq=False)
class StorePart(BlocksPart[Hands, bytes, Files]):
    urgent: bool = False

    def run(self, hands: Hands, gain: Gain) -> None:
        refusal = hands.pages.refusal(self.keyspace, seals=True)
        if refusal is not None:
            self.refused(refusal)
            return
        while self.blocks and not self.task.is_over:
            one, *self.blocks = self.blocks
            hands.renew()
            self.settled(one, self.deps.health.refusal(storing=True) or self._store(hands, one), gain)

    def _store(self, hands: Hands, one: Lent[bytes]) -> Refusal | bool | None:
        """Store one block: True if stored, False if it existed, None if the disk failed, or the refusal."""
        files, stored = self.deps, False
        admitted = files.index.admit(one.place, file_bytes(len(one.view)), files.enforcement.ages.age_s(one.key))
        if not isinstance(admitted, Reservation):
            return admitted or False
        try:
            files.evict(admitted.victims, admitted.size_bytes)
            if not self._claim(admitted):
                return Refusal.TIER_FULL
            self._write(hands, one, admitted)
            stored = True
        except TooLateError:
            return Refusal.LATE
        except DiskError as error:
            refusal = files.health.failed(error)
            if refusal is None:
                files.counters.add("errors")
            return refusal
        finally:
            if admitted.spare is not None and not stored:
                with suppress(DiskError):
                    files.disk.unlink(SPARES, admitted.spare.name)
            files.index.end(admitted, stored=stored)
        files.health.wrote()
        return True

    def _claim(self, admitted: Reservation) -> bool:
        """Wait for room on the disk, removing spares of other sizes; return whether there is room."""
        files = self.deps
        give_up_at_s = files.clocks.now_s() + CLAIM_TIMEOUT_S
        while not files.index.claim(admitted, max(0.0, give_up_at_s - files.clocks.now_s())):
            errors = [files.discard(spare) for spare in files.index.take_spares(but_bytes=admitted.size_bytes)]
            if not errors or any(errors):
                return False
        return True

    def _write(self, hands: Hands, one: Lent[bytes], admitted: Reservation) -> None:
        files, pages, clocks = self.deps, hands.pages, self.deps.clocks
        try:
            with files.spans.held(one.view):
                if self.task.is_over:  # checked after the memory is held, and so held back when freed
                    raise TooLateError
                name, computed_s = block_name(files.params.domain, one.place), clocks.to_wall(admitted.computed_s)
                files.disk.write(
                    self.keyspace,
                    files.name(one.place),
                    secrets.token_hex(8),
                    pages.seal(self.keyspace, name, one.view, int(1000 * computed_s)),
                    computed_s,
                    clocks.to_wall(clocks.now_s()),
                    lambda: not self.task.is_over,
                    None if admitted.spare is None else admitted.spare.name,
                )
        finally:
            pages.wipe()

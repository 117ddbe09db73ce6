"""Parts of tasks on files: store, load, remove."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstrata.contract.store.block_file import block_name, file_bytes, file_name, keyspace_of
from kvstrata.contract.store.block_value import HEADER_BYTES
from kvstrata_sidecar.adapter.files.disk import SPARES, Clocks, Disk
from kvstrata_sidecar.adapter.files.file_format import Pages, Verdict, unread
from kvstrata_sidecar.adapter.files.file_index import FileIndex
from kvstrata_sidecar.adapter.files.health import DiskError, Fault, Health, TooLateError
from kvstrata_sidecar.adapter.files.space import Reservation, Spare, Victim
from kvstrata_sidecar.adapter.index.victims import Cause
from kvstrata_sidecar.adapter.params import AdapterParams, FileTierParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, Refusal
from kvstrata_sidecar.adapter.tier.buffers import Spans, address_of
from kvstrata_sidecar.adapter.tier.counts import EVICTION, HIT, Counters
from kvstrata_sidecar.adapter.tier.tasks import Gain, Key, Part, Task

CLAIM_TIMEOUT_S = 5.0
"""How long a store waits for removals by others before it gives up its file."""

STALL_S = 1.0
"""An operation that takes this long after its task ended counts as a hanging disk."""


@dataclass(frozen=True, slots=True)
class Files:
    """Dependencies of all work on one directory. Each worker makes its own pages."""

    params: AdapterParams
    tier: FileTierParams
    disk: Disk
    index: FileIndex
    health: Health
    clocks: Clocks
    counters: Counters
    enforcement: Enforcement
    spans: Spans
    make_pages: Callable[[], Pages]

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

    def unlink(self, keyspace: str, name: str, *, erasing: bool) -> None:
        """Remove a file; when `erasing`, overwrite a plain one first."""
        if erasing and not self.tier.encrypts:
            self.disk.overwrite(keyspace, name)
        self.disk.unlink(keyspace, name)

    def evict(self, victims: Mapping[bytes, Victim], spare_bytes: int = 0) -> None:
        """Remove and count evicted blocks. Files of `spare_bytes` that made room become spares."""
        for key, victim in victims.items():
            keyspace = keyspace_of(key)
            scope = keyspace if self.index.bounds(keyspace) is not None else ""
            if victim.cause is Cause.RETENTION:
                self.counters.add("expired", 1, scope)
            else:
                self.counters.add("evicted", 1, scope)
                self.counters.add("evicted_bytes", victim.size_bytes, scope)
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

    @contextmanager
    def lent(self, view: memoryview) -> Iterator[None]:
        """Hold LMCache's memory while the disk may touch it."""
        address = address_of(view)
        number = None if address is None else self.spans.hold(address, len(view))
        try:
            yield
        finally:
            if number is not None:
                self.spans.release(number)


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


class Lent(NamedTuple):
    """A block and the LMCache memory for it; `position` is its place in the request."""

    position: int
    key: Key
    block: bytes
    view: memoryview


@dataclass(slots=True, eq=False)
class BlocksPart(Part[Hands]):
    """Blocks for a keyspace, kept under it or, for loads, under pools'."""

    task: Task | None
    keyspace: str
    blocks: Sequence[Lent]
    files: Files
    size: int = field(init=False, default=0)
    left: int = field(init=False, default=0)
    pools: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.pools = tuple({keyspace_of(one.block) for one in self.blocks} - {self.keyspace})
        self.size = sum(len(one.view) for one in self.blocks)
        self.left = len(self.blocks)

    def refused(self, refusal: Refusal) -> None:
        self.files.counters.refuse(refusal, self.left, self.keyspace)

    @property
    def over_already(self) -> bool:
        """Whether the task is over: no further block is begun or renamed into place."""
        return self.task is not None and (self.task.cancelled or self.task.answered)


@dataclass(slots=True, eq=False)
class LoadPart(BlocksPart):
    urgent: bool = True

    def run(self, hands: Hands, gain: Gain) -> None:
        files = self.files
        counts: Counter[str] = Counter()
        for one in self.blocks:
            if self.over_already:
                return
            hands.renew()
            self.left -= 1
            kept = keyspace_of(one.block)
            refusal = hands.pages.refusal(kept)
            if refusal is not None:
                files.counters.refuse(refusal, 1, kept)
            elif self._load(hands, one, kept):
                size = len(one.view)
                gain.hits.append(one.position)
                gain.carried(one.key, size)
                counts.update(loaded=1, loaded_bytes=size)
                files.enforcement.loaded_from(one.key, kept, one.view)
                if kept != self.keyspace:
                    counts.update(pool_hits=1, pool_bytes=size)
            else:
                files.counters.add("load_misses")
        for name, amount in counts.items():
            files.counters.add(name, amount, self.keyspace)

    def _load(self, hands: Hands, one: Lent, keyspace: str) -> bool:
        files, pages = self.files, hands.pages
        kept = files.index.begin_read(one.block)
        if kept is None:
            return False
        verdict = Verdict.FOREIGN
        try:
            with files.lent(one.view):
                if self.over_already:  # checked after the memory is held, and so held back when freed
                    return False
                try:
                    file, name = files.name(one.block), block_name(files.params.domain, one.block)
                    whole = files.disk.read(keyspace, file, pages.room(one.view))
                    if self.over_already:
                        return False
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
            files.index.end_read(one.block)
        if verdict is Verdict.GOOD:
            age_s = max(0.0, files.clocks.now_s() - kept.computed_s)
            files.enforcement.ages.inherit(one.key, age_s)
            files.counters.age(HIT, age_s)
            return True
        if verdict is Verdict.DAMAGED:
            files.counters.add("unreadable")
            if files.index.drop(one.block):
                files.remove(one.block)
        return False


@dataclass(slots=True, eq=False)
class StorePart(BlocksPart):
    urgent: bool = False

    def run(self, hands: Hands, gain: Gain) -> None:
        refusal = hands.pages.refusal(self.keyspace, seals=True)
        if refusal is not None:
            self.refused(refusal)
            return
        counters = self.files.counters
        for one in self.blocks:
            if self.over_already:
                break
            hands.renew()
            self.left -= 1
            stored = self.files.health.refusal(storing=True) or self._store(hands, one)
            if stored is True or stored is None:
                gain.hits.append(one.position)
            if stored is True:
                gain.carried(one.key, len(one.view))
            elif stored is None:
                counters.add("stores_present")
            elif isinstance(stored, Refusal):
                counters.refuse(stored, 1, self.keyspace)
        if gain.sizes:
            counters.add("stored", len(gain.sizes), self.keyspace)
            counters.add("stored_bytes", sum(gain.sizes), self.keyspace)

    def _store(self, hands: Hands, one: Lent) -> Refusal | bool | None:
        """Store one block: True if stored, None if it existed, False if the disk failed, or the refusal."""
        files, stored = self.files, False
        admitted = files.index.admit(one.block, file_bytes(len(one.view)), files.enforcement.ages.age_s(one.key))
        if not isinstance(admitted, Reservation):
            return admitted
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
            return refusal or False
        finally:
            if admitted.spare is not None and not stored:
                with suppress(DiskError):
                    files.disk.unlink(SPARES, admitted.spare.name)
            files.index.end(admitted, stored=stored)
        files.health.wrote()
        return True

    def _claim(self, admitted: Reservation) -> bool:
        """Wait for room on the disk, removing spares of other sizes; return whether there is room."""
        files = self.files
        give_up_at_s = files.clocks.now_s() + CLAIM_TIMEOUT_S
        while not files.index.claim(admitted, max(0.0, give_up_at_s - files.clocks.now_s())):
            errors = [files.discard(spare) for spare in files.index.take_spares(but_bytes=admitted.size_bytes)]
            if not errors or any(errors):
                return False
        return True

    def _write(self, hands: Hands, one: Lent, admitted: Reservation) -> None:
        files, pages, clocks = self.files, hands.pages, self.files.clocks
        try:
            with files.lent(one.view):
                if self.over_already:  # checked after the memory is held, and so held back when freed
                    raise TooLateError
                name, computed_s = block_name(files.params.domain, one.block), clocks.to_wall(admitted.computed_s)
                files.disk.write(
                    self.keyspace,
                    files.name(one.block),
                    secrets.token_hex(8),
                    pages.seal(self.keyspace, name, one.view, int(1000 * computed_s)),
                    computed_s,
                    clocks.to_wall(clocks.now_s()),
                    lambda: not self.over_already,
                    None if admitted.spare is None else admitted.spare.name,
                )
        finally:
            pages.wipe()


@dataclass(slots=True, eq=False)
class RemovePart(Part[Hands]):
    """Remove blocks of one keyspace. When `done` is set, `removed` has those that existed. `counter` counts them, if
    any."""

    keyspace: str
    blocks: Sequence[bytes]
    files: Files
    counter: str = ""
    task: Task | None = None
    urgent: bool = True
    removed: list[bytes] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, hands: Hands, gain: Gain) -> None:  # noqa: ARG002
        self.removed = self.files.index.take_unused(self.blocks)
        for key in self.removed:
            self.files.remove(key)
        if self.counter and self.removed:
            self.files.counters.add(self.counter, len(self.removed), self.keyspace)

    def refused(self, refusal: Refusal) -> None:
        self.files.counters.refuse(refusal, len(self.blocks), self.keyspace)

    def over(self, error: Exception | None) -> None:  # noqa: ARG002
        self.done.set()

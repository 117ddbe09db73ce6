"""Erases keyspaces from a tier's directory, and says what that is worth on the file system that it is on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstrata.contract.store.block_file import keyspace_of, parse_file_name
from kvstrata_sidecar.adapter.files.exchanges import Files
from kvstrata_sidecar.adapter.files.faults import DiskError
from kvstrata_sidecar.adapter.files.spares import SPARES, Spare

T = TypeVar("T")

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "overlay", "bcachefs"})
WAIT_S = 0.1
AT_ONCE = 512
MAX_TALLIES = 65_536


@dataclass(frozen=True, slots=True)
class Purged:
    """What is gone of some keyspaces since they were first asked for, and what readers, writers or the disk hold."""

    gone_bytes: int = 0
    gone_blocks: int = 0
    held_bytes: int = 0
    held_blocks: int = 0
    residue: str = ""


class Purger:
    """Purges one directory, each in a thread of its own: a disk that hangs must not hold up who asks.

    `residue` says why copies may be left that no file operation reaches, empty where none can be read.
    """

    def __init__(self, files: Files, clock: Callable[[], float]) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies: dict[str, tuple[int, int]] = {}

    def within(self, timeout_s: float, work: Callable[[], T]) -> T | None:
        """Return what `work` returns, from a thread of its own; None if that takes longer, and goes on meanwhile."""
        give_up_at_s = self._clock() + timeout_s
        # One at a time: who asks again while a disk hangs must not add a thread each time.
        if not self._lock.acquire(timeout=timeout_s):
            return None
        result: list[T] = []

        def run() -> None:
            try:
                result.append(work())
            finally:
                self._lock.release()

        thread = threading.Thread(target=run, name="kvs-purge", daemon=True)
        thread.start()
        thread.join(max(0.0, give_up_at_s - self._clock()))
        return result[0] if result else None

    def forget(self, keyspaces: Collection[str]) -> None:
        """Count anew what goes of these keyspaces, which are in the policy again."""
        for keyspace in keyspaces:
            self._tallies.pop(keyspace, None)

    def purge_now(self, keyspaces: frozenset[str], timeout_s: float) -> Purged:
        """Remove all blocks that these keyspaces have now, and wait `timeout_s` for who uses one; see `within`."""
        give_up_at_s = self._clock() + timeout_s
        files, problem = self._files, ""
        doomed = files.shelf.condemned(keyspaces)
        held = dict(doomed)
        while held and files.health.breaker.closed:
            for some in _slices(list(held)):
                for key in files.shelf.take_unused(some):
                    problem = self._erase(key, held.pop(key)) or problem
            held = {key: held[key] for some in _slices(list(held)) for key in files.shelf.known(some)}
            if not held or self._clock() >= give_up_at_s:
                break
            files.shelf.wait(WAIT_S)
        if files.health.breaker.closed:
            # One may have been a block of these keyspaces.
            for spare in files.shelf.take_spares():
                problem = self._erase_spare(spare) or problem
            for keyspace in keyspaces:
                problem = self._sweep(keyspace) or problem
        # What could not be removed is still on the shelf's account.
        if problem:
            held |= {key: doomed[key] for key in files.shelf.known(doomed)}
        sums = [self._tallies.get(keyspace, (0, 0)) for keyspace in keyspaces]
        gone_bytes, gone_blocks = (sum(figures) for figures in zip(*sums, strict=True))
        return Purged(gone_bytes, gone_blocks, sum(held.values()), len(held), self._residue(problem))

    def _erase(self, key: bytes, size_bytes: int) -> str:
        """Remove a block that was taken out of the index; return what went wrong, if anything did."""
        files, keyspace = self._files, keyspace_of(key)
        try:
            self._remove(keyspace, files.name(key))
        except DiskError as error:
            files.health.failed(error)
            files.shelf.stranded(key)
            return str(error)
        files.shelf.gone(key)
        self._count(keyspace, size_bytes)
        return ""

    def _erase_spare(self, spare: Spare) -> str:
        """Remove a spare; return what went wrong, if anything did."""
        try:
            self._remove(SPARES, spare.name)
        except DiskError as error:
            self._files.health.failed(error)
            self._files.shelf.spare_gone(spare, removed=False)
            return str(error)
        self._files.shelf.spare_gone(spare)
        return ""

    def _sweep(self, keyspace: str) -> str:
        """Remove what is in a keyspace's directory and in no index; return what went wrong, if anything did."""
        files = self._files
        try:
            for name in files.disk.names(keyspace):
                parsed = parse_file_name(keyspace, name[1:].rpartition(".")[0] if name.startswith(".") else name)
                if parsed is None or not files.shelf.known([parsed[0]]):
                    self._remove(keyspace, name)
            files.disk.sync(keyspace)
            if not files.shelf.condemned((keyspace,)):
                files.disk.forget(keyspace)
        except DiskError as error:
            files.health.failed(error)
            return str(error)
        return ""

    def _remove(self, keyspace: str, name: str) -> None:
        if not self._files.encrypted:
            self._files.disk.overwrite(keyspace, name)
        self._files.disk.unlink(keyspace, name)

    def _count(self, keyspace: str, size_bytes: int) -> None:
        if keyspace not in self._tallies and len(self._tallies) >= MAX_TALLIES:
            del self._tallies[next(iter(self._tallies))]
        known_bytes, known_blocks = self._tallies.get(keyspace, (0, 0))
        self._tallies[keyspace] = known_bytes + size_bytes, known_blocks + 1

    def _residue(self, problem: str) -> str:
        told = [problem] if problem else []
        if not self._files.encrypted:
            told.append(residue_of(file_system(self._files.disk.path)))
        return "; ".join(told)


def _slices(keys: list[bytes]) -> Iterator[list[bytes]]:
    """Give a part of the keys at a time: lookups wait while the index is changed."""
    for start in range(0, len(keys), AT_ONCE):
        yield keys[start : start + AT_ONCE]


def residue_of(file_system_type: str) -> str:
    """Return what overwriting plain files in place leaves behind on a file system."""
    text = (
        f"plain blocks on {file_system_type}: flash keeps earlier copies that no file operation reaches, and files that"
        " made room or grew too old before were removed without being overwritten"
    )
    if file_system_type in COPY_ON_WRITE:
        text += ", and the file system did not overwrite them in place"
    return text


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that a path is on, as the kernel names it."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    except (OSError, IndexError):
        pass
    return "an unknown file system"

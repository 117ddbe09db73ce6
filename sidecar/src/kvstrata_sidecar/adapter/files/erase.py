"""Erases keyspaces from a tier's directory, and reports the remainder, by listing the directory itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata.contract.store.block_file import keyspace_of, parse_file_name, parts_of
from kvstrata_sidecar.adapter.files.disk import SPARES
from kvstrata_sidecar.adapter.files.exchanges import Files
from kvstrata_sidecar.adapter.files.health import DiskError
from kvstrata_sidecar.adapter.files.space import Spare

T = TypeVar("T")

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "overlay", "bcachefs"})
WAIT_S = 0.1
AT_ONCE = 512
MAX_TALLIES = 65_536
MEDIUM = "NVMe"
WITHIN_S = 3.0
"""Time for removal and check together; a caller that wants to wait longer asks again."""


@dataclass(frozen=True, slots=True)
class Purged:
    """Blocks gone since the keyspaces were first requested, and blocks held by readers, writers or the disk."""

    gone_bytes: int = 0
    gone_blocks: int = 0
    held_bytes: int = 0
    held_blocks: int = 0
    residue: str = ""


class _Found(NamedTuple):
    purged: Purged
    listed: int
    rewriting: int
    problem: str = ""


class FileEraser:
    """Erases from the directory of `files`, which is the tier `name`. Disk work runs in a thread of its own: a hanging
    disk must not block the caller."""

    def __init__(self, name: str, files: Files, clock: Callable[[], float]) -> None:
        self._name = name
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies: dict[str, tuple[int, int]] = {}

    def erase(self, keyspaces: Collection[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        """Remove the current blocks of these keyspaces, and return the remainder. Blocks in use are removed when they
        are released. `seen` is called with the keyspace and chunk hash of each block found."""
        names, index, health = frozenset(keyspaces), self._files.index, self._files.health
        for key in index.condemned(names):
            seen(keyspace_of(key), parts_of(key)[-1])
        found = self._within(WITHIN_S, lambda: self._look(names))
        left = index.condemned(names)
        reading, writing = index.uses(left)
        remaining = Amount(len(left), sum(left.values()))
        problems, checked, deleted, rewriting, residue = [], list[Check](), Amount(), 0, ""
        if health.recovering:
            problems.append("the files are still being counted")
        if not health.breaker.closed:
            problems.append(f"the disk is not used now: {health.detail or 'it failed or hangs'}")
        if found is None:
            problems.append("the disk has not ended the removal yet")
        else:
            deleted, residue = Amount(found.purged.gone_blocks, found.purged.gone_bytes), found.purged.residue
            rewriting = found.rewriting
            if found.problem:
                problems.append(found.problem)
            elif found.listed > len(left):
                problems.append(f"{found.listed - len(left)} files are in the keyspaces' directories and in no index")
            looked = not problems
            checked += [Check.INDEX] if looked and not left else []
            checked += [Check.DIRECTORY] if looked and not found.listed else []
            checked += [Check.SPARES] if looked and not left and not rewriting else []
        return ErasedTier(
            self._name,
            MEDIUM,
            encrypted=self._files.encrypted,
            found=deleted + remaining,
            deleted=deleted,
            remaining=remaining,
            reading=reading,
            writing=writing,
            removing=max(0, len(left) - reading - writing),
            rewriting=rewriting,
            checked=tuple(checked),
            problem="; ".join(problems),
            residue=residue,
        )

    def _within(self, timeout_s: float, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, run in a thread of its own; None after the timeout, while it continues."""
        give_up_at_s = self._clock() + timeout_s
        # One thread at a time: repeated requests must not add threads while a disk hangs.
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
        for keyspace in keyspaces:
            self._tallies.pop(keyspace, None)

    def _purge(self, keyspaces: frozenset[str], timeout_s: float) -> Purged:
        """Remove all current blocks of these keyspaces, and wait `timeout_s` for blocks in use; see `_within`."""
        give_up_at_s = self._clock() + timeout_s
        files, problem = self._files, ""
        doomed = files.index.condemned(keyspaces)
        held = dict(doomed)
        while held and files.health.breaker.closed:
            for some in _slices(list(held)):
                for key in files.index.take_unused(some):
                    problem = self._erase(key, held.pop(key)) or problem
            held = {key: held[key] for some in _slices(list(held)) for key in files.index.known(some)}
            if not held or self._clock() >= give_up_at_s:
                break
            files.index.wait(WAIT_S)
        if files.health.breaker.closed:
            # A spare may have been a block of these keyspaces.
            for spare in files.index.take_spares():
                problem = self._erase_spare(spare) or problem
            for keyspace in keyspaces:
                problem = self._sweep(keyspace) or problem
        # The index still counts the blocks that could not be removed.
        if problem:
            held |= {key: doomed[key] for key in files.index.known(doomed)}
        sums = [self._tallies.get(keyspace, (0, 0)) for keyspace in keyspaces]
        gone_bytes, gone_blocks = (sum(figures) for figures in zip(*sums, strict=True))
        return Purged(gone_bytes, gone_blocks, sum(held.values()), len(held), self._residue(problem))

    def _look(self, names: frozenset[str]) -> _Found:
        files = self._files
        purged = self._purge(names, WITHIN_S / 3)
        # Empty keyspaces produce no more spares: later ones are others'.
        rewriting = files.index.spare_names()
        give_up_at_s = self._clock() + WITHIN_S / 3
        while rewriting and self._clock() < give_up_at_s:
            files.index.wait(WAIT_S)
            rewriting &= files.index.spare_names()
        try:
            listed = sum(len(files.disk.names(keyspace)) for keyspace in names)
        except DiskError as error:
            files.health.failed(error)
            return _Found(purged, 0, len(rewriting), str(error))
        return _Found(purged, listed, len(rewriting))

    def _erase(self, key: bytes, size_bytes: int) -> str:
        """Remove a block that was taken out of the index; return the error, empty for none."""
        files, keyspace = self._files, keyspace_of(key)
        try:
            self._remove(keyspace, files.name(key))
        except DiskError as error:
            files.health.failed(error)
            files.index.stranded(key)
            return str(error)
        files.index.gone(key)
        self._count(keyspace, size_bytes)
        return ""

    def _erase_spare(self, spare: Spare) -> str:
        try:
            self._remove(SPARES, spare.name)
        except DiskError as error:
            self._files.health.failed(error)
            self._files.index.spare_gone(spare, removed=False)
            return str(error)
        self._files.index.spare_gone(spare)
        return ""

    def _sweep(self, keyspace: str) -> str:
        """Remove files of a keyspace that no index has; return the error, empty for none."""
        files = self._files
        try:
            for name in files.disk.names(keyspace):
                parsed = parse_file_name(keyspace, name[1:].rpartition(".")[0] if name.startswith(".") else name)
                if parsed is None or not files.index.known([parsed[0]]):
                    self._remove(keyspace, name)
            files.disk.sync(keyspace)
            if not files.index.condemned((keyspace,)):
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
        problems = [problem] if problem else []
        if not self._files.encrypted:
            problems.append(residue_of(file_system(self._files.disk.path)))
        return "; ".join(problems)


def _slices(keys: list[bytes]) -> Iterator[list[bytes]]:
    """Yield slices of the keys: lookups wait while the index is changed."""
    for start in range(0, len(keys), AT_ONCE):
        yield keys[start : start + AT_ONCE]


def residue_of(file_system_type: str) -> str:
    text = (
        f"plain blocks on {file_system_type}: flash keeps earlier copies that no file operation reaches, and files that"
        " made room or grew too old before were removed without being overwritten"
    )
    if file_system_type in COPY_ON_WRITE:
        text += ", and the file system did not overwrite them in place"
    return text


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
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

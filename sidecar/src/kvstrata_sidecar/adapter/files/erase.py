"""Erases keyspaces from a tier's directory, and reports the remainder, by listing the directory itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from itertools import filterfalse
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvstrata.contract.messages.erase import Amount, Check, ErasedTier
from kvstrata.contract.store.block_file import ROOT, is_keyspace_directory, keyspace_of, parse_file_name, parts_of
from kvstrata_sidecar.adapter.files.directories import Folder
from kvstrata_sidecar.adapter.files.disk import SPARES, Disk
from kvstrata_sidecar.adapter.files.exchanges import Files
from kvstrata_sidecar.adapter.files.file_index import in_slices
from kvstrata_sidecar.adapter.files.health import DiskError
from kvstrata_sidecar.adapter.tier.interface import FILES

T = TypeVar("T")

COPY_ON_WRITE = frozenset({"btrfs", "zfs", "overlay", "bcachefs"})
WAIT_S = 0.1
MAX_TALLIES = 65_536
WITHIN_S = 3.0
"""Time for removal and check together; a caller that wants to wait longer asks again."""


class _Found(NamedTuple):
    """Files `listed` in the keyspaces' directories, and spares that are `rewriting`: neither removed nor written over
    yet. `elsewhere` are files in other places of the folder, None if not every one was looked at."""

    residue: str = ""
    listed: int = 0
    rewriting: int = 0
    problem: str = ""
    elsewhere: int | None = None


class FileEraser:
    """Erases from the directory of `files`. Disk work runs in a thread of its own: a hanging disk must not block the
    caller."""

    def __init__(self, files: Files, clock: Callable[[], float], folder: Folder | None = None) -> None:
        self._files = files
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies: dict[str, Amount] = {}

    def erase(self, keyspaces: Collection[str], seen: Callable[[str, bytes], None]) -> ErasedTier:
        """Remove the current blocks of these keyspaces, and return the remainder. Blocks in use are removed when they
        are released. `seen` is called with the keyspace and chunk hash of each block found."""
        names, index, health = frozenset(keyspaces), self._files.index, self._files.health
        for key in index.condemned(names):
            seen(keyspace_of(key), parts_of(key)[-1])
        found = self._within(WITHIN_S, lambda: self._look(names))
        left = index.condemned(names)
        deleted = sum((self._tallies.get(keyspace, Amount()) for keyspace in names), Amount())
        reading, writing = index.uses(left)
        remaining = Amount(len(left), sum(left.values()))
        problems = ["the files are still being counted"] if health.recovering else []
        if not health.breaker.closed:
            problems.append(f"the disk is not used now: {health.detail or 'it failed or hangs'}")
        if found is None:
            problems.append("the disk has not ended the removal yet")
            found = _Found()
        elif found.problem:
            problems.append(found.problem)
        elif found.listed > len(left):
            problems.append(f"{found.listed - len(left)} files are in the keyspaces' directories and in no index")
        checks = {
            Check.INDEX: not left,
            Check.DIRECTORY: not found.listed,
            Check.SPARES: not left and not found.rewriting,
            Check.PLACES: found.elsewhere == 0,
        }
        return ErasedTier(
            self._files.tier.name,
            FILES,
            encrypted=self._files.tier.encrypts,
            found=deleted + remaining,
            deleted=deleted,
            remaining=remaining,
            reading=reading,
            writing=writing,
            removing=max(0, len(left) - reading - writing),
            rewriting=found.rewriting,
            checked=() if problems else tuple(check for check, passed in checks.items() if passed),
            problem="; ".join(problems),
            residue=found.residue,
        )

    def forget(self, keyspaces: Collection[str]) -> None:
        for keyspace in keyspaces:
            self._tallies.pop(keyspace, None)

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

    def _look(self, names: frozenset[str]) -> _Found:
        """Remove the blocks that nothing uses, and look for the rest; see `_within`."""
        files, index = self._files, self._files.index
        purged = self._purge(names, WITHIN_S / 3)
        # Empty keyspaces produce no more spares: later ones are others'.
        rewriting = index.spare_names()
        give_up_at_s = self._clock() + WITHIN_S / 3
        while rewriting and self._clock() < give_up_at_s:
            index.wait(WAIT_S)
            rewriting &= index.spare_names()
        found = purged._replace(rewriting=len(rewriting))
        try:
            found = found._replace(listed=sum(len(files.disk.names(keyspace)) for keyspace in names))
        except DiskError as error:
            files.health.failed(error)
            return found._replace(problem=str(error))
        with suppress(DiskError, OSError):
            found = found._replace(elsewhere=self._elsewhere(self._folder, names) if self._folder else None)
        return found

    def _elsewhere(self, folder: Folder, keyspaces: frozenset[str]) -> int:
        """Erase from places of ended cache servers; return the number of files left in all places but the own."""
        left, paths = 0, {*folder.places()} - {self._files.disk.path}
        for path in paths:
            with suppress(DiskError, OSError), closing(Disk(path)) as place:
                place.open()
                for keyspace in (SPARES, *keyspaces):  # a spare may have been a block of these
                    for name in (names := [*filterfalse(is_keyspace_directory, place.names(keyspace))]):
                        size_bytes = os.lstat(path / ROOT / keyspace / name).st_size
                        self._files.unlink(keyspace, name, erasing=True, disk=place)
                        self._count(keyspace, size_bytes)
                    if names:
                        place.sync(keyspace)
        for directory in (path / ROOT / keyspace for path in paths for keyspace in keyspaces):
            with suppress(FileNotFoundError, NotADirectoryError):
                left += len(os.listdir(directory))
        return left

    def _purge(self, keyspaces: frozenset[str], timeout_s: float) -> _Found:
        """Remove all current blocks of these keyspaces, and wait `timeout_s` for blocks in use."""
        give_up_at_s = self._clock() + timeout_s
        files, index, problem = self._files, self._files.index, ""
        held = index.condemned(keyspaces)
        while held and files.health.breaker.closed:
            for some in in_slices(list(held)):
                for key in index.take_unused(some):
                    size_bytes, error = held.pop(key), files.remove(key, erasing=True)
                    problem = error or problem
                    if not error:
                        self._count(keyspace_of(key), size_bytes)
            held = {key: held[key] for some in in_slices(list(held)) for key in index.known(some)}
            if not held or self._clock() >= give_up_at_s:
                break
            index.wait(WAIT_S)
        if files.health.breaker.closed:
            # A spare may have been a block of these keyspaces.
            for spare in index.take_spares():
                problem = files.discard(spare, erasing=True) or problem
            for keyspace in keyspaces:
                problem = self._sweep(keyspace) or problem
        residue = "" if files.tier.encrypts else residue_of(file_system(files.disk.path))
        return _Found("; ".join(filter(None, (problem, residue))))

    def _sweep(self, keyspace: str) -> str:
        """Remove files of a keyspace that no index has; return the error, empty for none."""
        files = self._files
        try:
            for name in files.disk.names(keyspace):
                parsed = parse_file_name(keyspace, name[1:].rpartition(".")[0] if name.startswith(".") else name)
                if parsed is None or not files.index.known([parsed[0]]):
                    files.unlink(keyspace, name, erasing=True)
            files.disk.sync(keyspace)
            if not files.index.condemned((keyspace,)):
                files.disk.forget(keyspace)
        except DiskError as error:
            files.health.failed(error)
            return str(error)
        return ""

    def _count(self, keyspace: str, size_bytes: int) -> None:
        if keyspace not in self._tallies and len(self._tallies) >= MAX_TALLIES:
            del self._tallies[next(iter(self._tallies))]
        self._tallies[keyspace] = self._tallies.get(keyspace, Amount()) + Amount(1, size_bytes)


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

"""Places in a folder that the pods of a node share: each cache server has one, and inherits a predecessor's.

`<folder>/kvs1/<domain>/<tier>/<model>/<number>` is a directory of block files. A start takes the lowest number with a
free lock, so the next pod on the node finds its predecessor's blocks. Running pods remove old blocks from places
without an owner.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.store.block_file import ROOT, is_keyspace_directory
from kvstrata_sidecar.adapter.files.disk import DIRECTORY_MODE, Directory, Disk
from kvstrata_sidecar.adapter.files.health import DiskError, Fault, disk_errors
from kvstrata_sidecar.adapter.tier.threads import Upkeep

logger = logging.getLogger(__name__)

MOST_PLACES = 64
"""Places for cache servers of one model on one node."""

DIRECTORIES_AT_ONCE = 256
"""Keyspaces after which a reaper pauses for `PAUSE_S`: others use the disk."""

PAUSE_S = 0.05
INTERVAL_S = 600.0
UNKNOWN_LIFE_S = 24 * 3600.0
"""Retention of blocks in a place without an owner, where the policy names none."""


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path
    domain: str
    tier: str
    model: str

    @property
    def of_tier(self) -> Path:
        """Holds the tier's places of all models."""
        return self.path / ROOT / self.domain / self.tier

    def place(self, number: int) -> Path:
        return self.of_tier / self.model / str(number)

    def places(self) -> Iterator[Path]:
        """Yield the tier's places of all models. Raises DiskError."""
        with disk_errors("list places"):
            for model in _names(self.of_tier):
                for number in _names(self.of_tier / model):
                    if number.isdecimal():
                        yield self.of_tier / model / number


class PlacedDisk(Disk):
    """A directory in a shared folder; `open` chooses it."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.path)
        self._folder = folder

    def open(self) -> None:
        """Take the first free place, created if necessary. Raises DiskError, BUSY if all are taken."""
        with disk_errors("open the folder"):
            # The folder itself is not created: its disk may not be mounted yet.
            Directory(self._folder.path, follow=True)
        for number in range(MOST_PLACES):
            self.path = self._folder.place(number)
            with disk_errors("make a place in the folder"):
                _make(self._folder.path, self.path)
            try:
                super().open()
            except DiskError as error:
                if error.fault is not Fault.BUSY:
                    raise
            else:
                return
        raise DiskError(Fault.BUSY, f"{MOST_PLACES} cache servers of this model have a place in the folder already")


class Reaper(Upkeep):
    """Removes old blocks from places of the pod's tier without an owner, of all models, periodically until `close`. It
    is a thread of its own, because other pods' folder may be large. `retention_s` returns a keyspace's retention in
    this pod's policy; where that is None, `unknown_s` applies."""

    def __init__(
        self, folder: Folder, retention_s: Callable[[str], float | None], *, unknown_s: float = UNKNOWN_LIFE_S
    ) -> None:
        super().__init__(folder.tier, "reaper")
        self._folder = folder
        self._retention_s = retention_s
        self._unknown_s = unknown_s
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            try:
                self.reap()
            except DiskError as error:
                logger.warning("Unused places could not be searched: %s", error)

    def close(self) -> None:
        self._closed.set()

    def reap(self) -> int:
        """Visit all free places, until it is closed; return the number of removed files. Raises DiskError if places
        cannot be listed. A place that fails is skipped."""
        removed = 0
        for path in self._folder.places():
            if self._closed.is_set():
                break
            try:
                removed += self._reap_place(path)
            except DiskError as error:
                if error.fault is not Fault.BUSY:
                    logger.warning("An unused place could not be searched: %s: %s", path, error)
        return removed

    def _reap_place(self, path: Path) -> int:
        place, blocks, removed = Disk(path), path / ROOT, 0
        # The lock keeps others from taking the place.
        place.open()
        with closing(place), disk_errors("look through a place"):
            keyspaces = [name for name in os.listdir(blocks) if is_keyspace_directory(name)]
            for number, keyspace in enumerate(keyspaces, 1):
                if self._closed.wait(0.0 if number % DIRECTORIES_AT_ONCE else PAUSE_S):
                    break
                life_s = self._retention_s(keyspace)
                oldest_s = time.time() - (self._unknown_s if life_s is None else life_s)
                for name in place.names(keyspace):
                    with suppress(FileNotFoundError):
                        about = os.stat(blocks / keyspace / name, follow_symlinks=False)
                        # The writer of an unfinished file is dead.
                        if stat.S_ISREG(about.st_mode) and (about.st_mtime <= oldest_s or name.startswith(".")):
                            removed += place.unlink(keyspace, name)
                place.forget(keyspace)
        return removed


def _make(root: Path, path: Path) -> None:
    for part in path.relative_to(root).parts:
        root /= part
        with suppress(FileExistsError):
            os.mkdir(root, DIRECTORY_MODE)


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []

"""One directory of block files: all operations on the disk.

A file appears under its name by renaming, whole; a writer that dies before leaves a temporary file, which the next
start removes. Nothing is synced: after a loss of power a file may have other bytes, which its tag reveals.

Files are read and written with O_DIRECT, from and into page-aligned memory, where the file system supports it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstrata.contract.store.block_file import CLOCK_FILE, PAGE_BYTES, ROOT, is_keyspace_directory, temporary_name
from kvstrata_sidecar.adapter.files.descriptors import (
    FILE_MODE,
    PROBE_NAME,
    Directory,
    open_directory,
    read_all,
    rename,
    takes_direct,
    write_all,
)
from kvstrata_sidecar.adapter.files.health import DiskError, Fault, TooLateError, disk_errors

DIRECTORY_MODE = 0o700

SPARES = "."
"""In place of a keyspace: spares are beside the keyspaces' directories, where a start finds and removes them."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file found by a scan. Times are seconds of the wall clock."""

    keyspace: str
    name: str
    size_bytes: int
    computed_s: float
    used_s: float


class Disk:
    """The files below one directory, from `open` until `close`. Thread-safe once open. Methods raise DiskError.
    `direct`: try O_DIRECT. The directory belongs to one process: `open` fails with BUSY if another process has it."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        self.direct = direct
        self._try_direct = direct
        self._opened: tuple[Directory, Directory] | None = None

    def open(self) -> None:
        with disk_errors("open the directory"):
            root = Directory(self.path, follow=True)
            with suppress(FileExistsError):
                os.mkdir(ROOT, DIRECTORY_MODE, dir_fd=root.number)
            blocks = Directory(ROOT, within=root)
            try:
                # The lock ends with the process.
                fcntl.flock(blocks.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DiskError(Fault.BUSY, "another process uses the directory") from None
            self.direct = self._try_direct and takes_direct(blocks.number)
            self._opened = root, blocks

    def close(self) -> None:
        """Release the directory once operations under way have ended."""
        self._opened = None

    @property
    def _root(self) -> Directory:
        return self._directories()[0]

    @property
    def _blocks(self) -> Directory:
        return self._directories()[1]

    def _directories(self) -> tuple[Directory, Directory]:
        opened = self._opened
        if opened is None:
            raise DiskError(Fault.MISSING, "the directory is not open")
        return opened

    def still_there(self) -> bool:
        """Whether the path still leads to the opened directory."""
        blocks = self._blocks
        with disk_errors("look at the directory"):
            own = os.fstat(blocks.number)
            try:
                named = os.stat(self.path / ROOT, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return own.st_nlink > 0 and (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino)

    def write(
        self,
        keyspace: str,
        name: str,
        token: str,
        buffers: Sequence[memoryview],
        computed_s: float,
        used_s: float,
        wanted: Callable[[], bool] = lambda: True,
        spare: str | None = None,
    ) -> None:
        """Write a file of whole pages, computed and used at these moments of the wall clock.

        Overwrites `spare`, a file of the same size, if it exists. `wanted` is called right before the rename. Raises
        DiskError, or TooLateError if it returns False; either leaves no file, unless the disk refuses the removal.
        """
        temporary, blocks = f"{keyspace}/{temporary_name(name, token)}", self._blocks
        with disk_errors("write a block"):
            descriptor = None if spare is None else self._reopen(blocks, f"{SPARES}/{spare}")
            if descriptor is None:
                descriptor = self._create(blocks, keyspace, temporary)
            else:
                temporary = f"{SPARES}/{spare}"
            try:
                try:
                    write_all(descriptor, buffers)
                    os.utime(descriptor, ns=(int(used_s * 1e9), int(computed_s * 1e9)))
                    if not self.direct:
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
                if not wanted():
                    raise TooLateError
                try:
                    rename(blocks, temporary, f"{keyspace}/{name}")
                except FileNotFoundError:
                    # With a spare the keyspace's directory may not exist yet.
                    with suppress(FileExistsError):
                        os.mkdir(keyspace, DIRECTORY_MODE, dir_fd=blocks.number)
                    rename(blocks, temporary, f"{keyspace}/{name}")
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=blocks.number)
                raise

    def read(self, keyspace: str, name: str, buffers: Sequence[memoryview]) -> bool:
        """Fill the buffers with a file; return whether its length is exactly theirs."""
        blocks = self._blocks
        with disk_errors("read a block"):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
            descriptor = os.open(f"{keyspace}/{name}", flags, dir_fd=blocks.number)
            try:
                length = sum(len(buffer) for buffer in buffers)
                if os.fstat(descriptor).st_size != length:
                    return False
                whole = read_all(descriptor, buffers)
                if not self.direct:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                return whole
            finally:
                os.close(descriptor)

    def spare(self, keyspace: str, name: str, spare: str) -> bool:
        """Turn a file into a spare of this name; return whether it existed."""
        blocks = self._blocks
        with disk_errors("keep a file"):
            try:
                rename(blocks, f"{keyspace}/{name}", f"{SPARES}/{spare}")
            except FileNotFoundError:
                return False
            return True

    def unlink(self, keyspace: str, name: str) -> bool:
        """Remove a file; return whether it existed."""
        blocks = self._blocks
        with disk_errors("remove a block"):
            try:
                os.unlink(f"{keyspace}/{name}", dir_fd=blocks.number)
            except FileNotFoundError:
                return False
            return True

    def used(self, keyspace: str, name: str, computed_s: float, used_s: float) -> None:
        """Record a block's last use; a missing file is ignored."""
        blocks = self._blocks
        with disk_errors("note a use"), suppress(FileNotFoundError):
            times = (int(used_s * 1e9), int(computed_s * 1e9))
            os.utime(f"{keyspace}/{name}", ns=times, dir_fd=blocks.number, follow_symlinks=False)

    def overwrite(self, keyspace: str, name: str) -> None:
        """Overwrite a file with zeros in place and sync it; a missing file is ignored."""
        blocks = self._blocks
        with disk_errors("overwrite a block"):
            try:
                descriptor = os.open(
                    f"{keyspace}/{name}", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=blocks.number
                )
            except FileNotFoundError:
                return
            try:
                zeros, left = memoryview(bytes(1 << 20)), os.fstat(descriptor).st_size
                while left > 0:
                    left -= os.write(descriptor, zeros[:left])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def forget(self, keyspace: str) -> bool:
        """Remove a keyspace's directory if it is empty; return whether it is gone."""
        blocks = self._blocks
        with disk_errors("remove a directory"):
            try:
                os.rmdir(keyspace, dir_fd=blocks.number)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
            return True

    def names(self, keyspace: str) -> list[str]:
        """Return the names of a keyspace's files, including temporary ones."""
        blocks = self._blocks
        with disk_errors("list blocks"):
            try:
                descriptor = open_directory(blocks, keyspace)
            except FileNotFoundError:
                return []
            try:
                return os.listdir(descriptor)
            finally:
                os.close(descriptor)

    def sync(self, keyspace: str) -> None:
        blocks = self._blocks
        with disk_errors("sync a directory"):
            try:
                descriptor = open_directory(blocks, keyspace)
            except FileNotFoundError:
                descriptor = os.dup(blocks.number)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def scan(self) -> Iterator[Found]:
        """Yield every file below the keyspaces' directories; remove anything else."""
        blocks = self._blocks
        with disk_errors("list blocks"):
            for keyspace in os.listdir(blocks.number):
                if not is_keyspace_directory(keyspace):
                    with suppress(OSError):
                        os.unlink(keyspace, dir_fd=blocks.number)
                    continue
                try:
                    descriptor = open_directory(blocks, keyspace)
                except FileNotFoundError:
                    continue
                except NotADirectoryError:
                    # Following a link would write this keyspace's blocks elsewhere.
                    os.unlink(keyspace, dir_fd=blocks.number)
                    continue
                try:
                    with os.scandir(descriptor) as entries:
                        for entry in entries:
                            with suppress(FileNotFoundError):
                                about = entry.stat(follow_symlinks=False)
                                size = about.st_size if stat.S_ISREG(about.st_mode) else -1
                                yield Found(keyspace, entry.name, size, about.st_mtime, about.st_atime)
                finally:
                    os.close(descriptor)

    def room(self) -> tuple[int, int]:
        """Return free and total bytes of the file system for this process."""
        blocks = self._blocks
        with disk_errors("ask for free space"):
            about = os.fstatvfs(blocks.number)
            return about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize

    def probe(self) -> None:
        """Write a page, read it and remove it. Raises DiskError if the disk fails or returns other bytes."""
        blocks = self._blocks
        with disk_errors("write and read a page"):
            page = b"kvstrata" * (PAGE_BYTES // 8)
            descriptor = os.open(
                PROBE_NAME, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE, dir_fd=blocks.number
            )
            try:
                os.pwrite(descriptor, page, 0)
                os.fsync(descriptor)
                answer = os.pread(descriptor, PAGE_BYTES, 0)
            finally:
                os.close(descriptor)
                os.unlink(PROBE_NAME, dir_fd=blocks.number)
            if answer != page:
                raise DiskError(Fault.BROKEN, "the disk gives back other bytes than were written")

    def remember_clock(self, now_s: float) -> None:
        """Store the wall clock for a start with a clock that is behind."""
        root = self._root
        with disk_errors("keep the time"):
            flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(CLOCK_FILE, flags, FILE_MODE, dir_fd=root.number)
            try:
                os.utime(descriptor, ns=(int(now_s * 1e9), int(now_s * 1e9)))
            finally:
                os.close(descriptor)

    def remembered_clock(self) -> float:
        """Return the latest stored wall clock, 0 for none."""
        root = self._root
        with disk_errors("read the time"):
            try:
                return os.stat(CLOCK_FILE, dir_fd=root.number, follow_symlinks=False).st_mtime
            except FileNotFoundError:
                return 0.0

    def _reopen(self, blocks: Directory, path: str) -> int | None:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        try:
            return os.open(path, flags, dir_fd=blocks.number)
        except FileNotFoundError:
            return None

    def _create(self, blocks: Directory, keyspace: str, temporary: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= os.O_DIRECT if self.direct else 0
        try:
            return os.open(temporary, flags, FILE_MODE, dir_fd=blocks.number)
        except FileNotFoundError:
            with suppress(FileExistsError):
                os.mkdir(keyspace, DIRECTORY_MODE, dir_fd=blocks.number)
            return os.open(temporary, flags, FILE_MODE, dir_fd=blocks.number)


def boottime_s() -> float:
    """Return seconds of a clock that never goes back and counts suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clocks:
    """Translates between the boot clock, `now_s`, and the wall clock. The wall clock is read once, at the start:
    setting it later changes no block's age."""

    def __init__(self, now_s: Callable[[], float] = boottime_s, wall_s: Callable[[], float] = time.time) -> None:
        self.now_s = now_s
        self._wall_s = wall_s
        self._ahead_s = wall_s() - now_s()

    def start(self, remembered_s: float) -> None:
        """Read the wall clock again; it is never earlier than a previous process' last reading."""
        self._ahead_s = max(self._wall_s(), remembered_s) - self.now_s()

    def to_wall(self, moment_s: float) -> float:
        return moment_s + self._ahead_s

    def from_wall(self, moment_s: float) -> float:
        return moment_s - self._ahead_s

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvstrata.contract.store.block_file import CLOCK_FILE, PAGE_BYTES, ROOT, is_keyspace_directory, temporary_name
from kvstrata_sidecar.adapter.files.health import DiskError, Fault, TooLateError, disk_errors

T = TypeVar("T")

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
PROBE_NAME = ".probe"

SPARES = "."
"""In place of a keyspace: spares are beside the keyspaces' directories, where a start finds and removes them."""


class Directory:
    """An open directory, closed with its last reference: its descriptor must not be reused meanwhile."""

    __slots__ = ("number",)

    def __init__(self, path: str | Path, *, within: Directory | None = None, follow: bool = False) -> None:
        self.number = -1
        flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
        self.number = os.open(path, flags, dir_fd=None if within is None else within.number)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)

    def rename(self, path: str, other: str) -> None:
        """Rename a file below it; replaces an existing file."""
        os.rename(path, other, src_dir_fd=self.number, dst_dir_fd=self.number)


@contextmanager
def opened(path: str, flags: int, within: Directory) -> Iterator[int]:
    """Yield the descriptor of a file in a directory."""
    descriptor = os.open(path, flags, FILE_MODE, dir_fd=within.number)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Found:
    """A file found by a scan. Times are seconds of the wall clock."""

    keyspace: str
    name: str
    size_bytes: int
    computed_s: float
    used_s: float


class Disk:
    """The files below one directory, from `open` until `close`. Thread-safe once open. Methods raise DiskError. The
    directory belongs to one process: `open` fails with BUSY if another process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = True
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
            self.direct = takes_direct(blocks)
            self._opened = root, blocks

    def close(self) -> None:
        """Release the directory once operations under way have ended."""
        self._opened = None

    def _directories(self) -> tuple[Directory, Directory]:
        directories = self._opened
        if directories is None:
            raise DiskError(Fault.MISSING, "the directory is not open")
        return directories

    @contextmanager
    def _blocks(self, what: str) -> Iterator[Directory]:
        """Yield the directory of blocks for an operation; `what` as in `disk_errors`."""
        with disk_errors(what):
            yield self._directories()[1]

    @property
    def _flags(self) -> int:
        return os.O_NOFOLLOW | (os.O_DIRECT if self.direct else 0)

    def still_there(self) -> bool:
        """Whether the path still leads to the opened directory."""
        with self._blocks("look at the directory") as blocks, suppress(FileNotFoundError):
            own, named = os.fstat(blocks.number), os.stat(self.path / ROOT, follow_symlinks=False)
            return own.st_nlink > 0 and os.path.samestat(own, named)
        return False

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
        """Write a file of whole pages, computed and used at these moments of the wall clock. Overwrites `spare`, a file
        of the same size, if it exists. `wanted` is called right before the rename. Raises DiskError, or TooLateError if
        it returns False; either leaves no file, unless the disk refuses the removal."""
        with self._blocks("write a block") as blocks:
            path, descriptor = self._open_new(blocks, keyspace, temporary_name(name, token), spare)
            try:
                try:
                    if not transfer(os.pwritev, descriptor, buffers):
                        raise OSError(errno.ENOSPC, "nothing was written")
                    os.utime(descriptor, ns=(int(used_s * 1e9), int(computed_s * 1e9)))
                    self._leave_cache(descriptor)
                finally:
                    os.close(descriptor)
                if not wanted():
                    raise TooLateError
                # With a spare the keyspace's directory may not exist yet.
                _within(blocks, keyspace, lambda: blocks.rename(path, f"{keyspace}/{name}"))
            except BaseException:
                with suppress(OSError):
                    os.unlink(path, dir_fd=blocks.number)
                raise

    def read(self, keyspace: str, name: str, buffers: Sequence[memoryview]) -> bool:
        """Fill the buffers with a file; return whether its length is exactly theirs."""
        path, flags = f"{keyspace}/{name}", os.O_RDONLY | self._flags
        with self._blocks("read a block") as blocks, opened(path, flags, blocks) as descriptor:
            if os.fstat(descriptor).st_size != sum(len(buffer) for buffer in buffers):
                return False
            whole = transfer(os.preadv, descriptor, buffers)
            self._leave_cache(descriptor)
            return whole

    def end(self, keyspace: str, name: str, length: int) -> bytes:
        """Return the last bytes of a file, at most `length`."""
        path, flags = f"{keyspace}/{name}", os.O_RDONLY | os.O_NOFOLLOW
        with self._blocks("read a block") as blocks, opened(path, flags, blocks) as descriptor:
            return os.pread(descriptor, length, max(0, os.fstat(descriptor).st_size - length))

    def spare(self, keyspace: str, name: str, spare: str) -> bool:
        """Turn a file into a spare of this name; return whether it existed."""
        with self._blocks("keep a file") as blocks, suppress(FileNotFoundError):
            blocks.rename(f"{keyspace}/{name}", f"{SPARES}/{spare}")
            return True
        return False

    def unlink(self, keyspace: str, name: str) -> bool:
        """Remove a file; return whether it existed."""
        with self._blocks("remove a block") as blocks, suppress(FileNotFoundError):
            os.unlink(f"{keyspace}/{name}", dir_fd=blocks.number)
            return True
        return False

    def used(self, keyspace: str, name: str, computed_s: float, used_s: float) -> None:
        """Record a block's last use; a missing file is ignored."""
        with self._blocks("note a use") as blocks, suppress(FileNotFoundError):
            times = (int(used_s * 1e9), int(computed_s * 1e9))
            os.utime(f"{keyspace}/{name}", ns=times, dir_fd=blocks.number, follow_symlinks=False)

    def overwrite(self, keyspace: str, name: str) -> None:
        """Overwrite a file with zeros in place and sync it; a missing file is ignored."""
        path, flags = f"{keyspace}/{name}", os.O_WRONLY | os.O_NOFOLLOW
        with (
            self._blocks("overwrite a block") as blocks,
            suppress(FileNotFoundError),
            opened(path, flags, blocks) as descriptor,
        ):
            zeros, left = memoryview(bytes(1 << 20)), os.fstat(descriptor).st_size
            while left > 0:
                left -= os.write(descriptor, zeros[:left])
            os.fsync(descriptor)

    def forget(self, keyspace: str) -> None:
        """Remove a keyspace's directory if it is empty."""
        with self._blocks("remove a directory") as blocks:
            try:
                os.rmdir(keyspace, dir_fd=blocks.number)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def names(self, keyspace: str) -> list[str]:
        """Return the names of a keyspace's files, including temporary ones."""
        with self._blocks("list blocks") as blocks, suppress(FileNotFoundError):
            directory = Directory(keyspace, within=blocks)
            return os.listdir(directory.number)
        return []

    def sync(self, keyspace: str) -> None:
        with self._blocks("sync a directory") as blocks:
            try:
                directory = Directory(keyspace, within=blocks)
            except FileNotFoundError:
                directory = blocks
            os.fsync(directory.number)

    def scan(self) -> Iterator[Found]:
        """Yield every file below the keyspaces' directories; remove anything else."""
        with self._blocks("list blocks") as blocks:
            for keyspace in os.listdir(blocks.number):
                if not is_keyspace_directory(keyspace):
                    with suppress(OSError):
                        os.unlink(keyspace, dir_fd=blocks.number)
                    continue
                try:
                    directory = Directory(keyspace, within=blocks)
                except FileNotFoundError:
                    continue
                except NotADirectoryError:
                    # Following a link would write this keyspace's blocks elsewhere.
                    os.unlink(keyspace, dir_fd=blocks.number)
                    continue
                with os.scandir(directory.number) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            about = entry.stat(follow_symlinks=False)
                            size = about.st_size if stat.S_ISREG(about.st_mode) else -1
                            yield Found(keyspace, entry.name, size, about.st_mtime, about.st_atime)

    def room(self) -> tuple[int, int]:
        """Return free and total bytes of the file system for this process."""
        with self._blocks("ask for free space") as blocks:
            about = os.fstatvfs(blocks.number)
            return about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize

    def probe(self) -> None:
        """Write a page, read it and remove it. Raises DiskError if the disk fails or returns other bytes."""
        page, flags = b"kvstrata" * (PAGE_BYTES // 8), os.O_CREAT | os.O_RDWR | os.O_TRUNC
        with self._blocks("write and read a page") as blocks, opened(PROBE_NAME, flags, blocks) as descriptor:
            try:
                os.pwrite(descriptor, page, 0)
                os.fsync(descriptor)
                if os.pread(descriptor, PAGE_BYTES, 0) != page:
                    raise DiskError(Fault.BROKEN, "the disk gives back other bytes than were written")
            finally:
                os.unlink(PROBE_NAME, dir_fd=blocks.number)

    def remember_clock(self, now_s: float) -> None:
        """Store the wall clock for a start with a clock that is behind."""
        root, _ = self._directories()
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW
        with disk_errors("keep the time"), opened(CLOCK_FILE, flags, root) as descriptor:
            os.utime(descriptor, ns=(int(now_s * 1e9), int(now_s * 1e9)))

    def remembered_clock(self) -> float:
        """Return the latest stored wall clock, 0 for none."""
        root, _ = self._directories()
        with disk_errors("read the time"), suppress(FileNotFoundError):
            return os.stat(CLOCK_FILE, dir_fd=root.number, follow_symlinks=False).st_mtime
        return 0.0

    def _open_new(self, blocks: Directory, keyspace: str, name: str, spare: str | None) -> tuple[str, int]:
        """Open the spare, or a new file where there is none; return its path and its descriptor."""
        flags = os.O_WRONLY | self._flags
        if spare is not None:
            with suppress(FileNotFoundError):
                path = f"{SPARES}/{spare}"
                return path, os.open(path, flags, dir_fd=blocks.number)
        path, flags = f"{keyspace}/{name}", flags | os.O_CREAT | os.O_EXCL
        return path, _within(blocks, keyspace, lambda: os.open(path, flags, FILE_MODE, dir_fd=blocks.number))

    def _leave_cache(self, descriptor: int) -> None:
        """Keep a block out of the kernel's page cache, too, where O_DIRECT is not possible."""
        if not self.direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _within(blocks: Directory, keyspace: str, work: Callable[[], T]) -> T:
    """Do work in a keyspace's directory, which is made if it is missing."""
    try:
        return work()
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(keyspace, DIRECTORY_MODE, dir_fd=blocks.number)
        return work()


def takes_direct(directory: Directory) -> bool:
    """Whether files here can be opened with O_DIRECT."""
    try:
        with opened(PROBE_NAME, os.O_CREAT | os.O_RDWR | os.O_DIRECT, directory):
            pass
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            with suppress(OSError):
                os.unlink(PROBE_NAME, dir_fd=directory.number)
            return False
        if error.errno == errno.EROFS:
            return True
        raise
    os.unlink(PROBE_NAME, dir_fd=directory.number)
    return True


def transfer(step: Callable[[int, list[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview]) -> bool:
    """Read or write (`os.preadv`, `os.pwritev`) all buffers in order from the file's beginning; return whether the file
    was long enough."""
    offset, left = 0, list(buffers)
    while left:
        count = step(descriptor, left, offset)
        if count <= 0:
            return False
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return True


boottime_s = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
"""Returns seconds of a clock that never goes back and counts suspension."""


class Clocks:
    """Translates between the boot clock, `now_s`, and the wall clock. The wall clock is read once, at the start:
    setting it later changes no block's age."""

    def __init__(self, now_s: Callable[[], float] = boottime_s) -> None:
        self.now_s = now_s
        self.start(0.0)

    def start(self, remembered_s: float) -> None:
        """Read the wall clock again; it is never earlier than a previous process' last reading."""
        self._ahead_s = max(time.time(), remembered_s) - self.now_s()

    def to_wall(self, moment_s: float) -> float:
        return moment_s + self._ahead_s

    def from_wall(self, moment_s: float) -> float:
        return moment_s - self._ahead_s

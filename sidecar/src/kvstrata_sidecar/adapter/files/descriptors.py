"""Directories and files by descriptors. Partial reads and writes are completed here."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o600
PROBE_NAME = ".probe"


class Directory:
    """An open directory, closed with its last reference: its descriptor must not be reused meanwhile."""

    __slots__ = ("number",)

    def __init__(self, path: str | Path, *, within: Directory | None = None, follow: bool = False) -> None:
        self.number = -1
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        self.number = os.open(path, flags, dir_fd=None if within is None else within.number)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def open_directory(within: Directory, name: str) -> int:
    """Open a directory in another without following links; the caller closes the descriptor."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within.number)


def rename(within: Directory, path: str, other: str) -> None:
    """Rename below a directory; replaces an existing file."""
    os.rename(path, other, src_dir_fd=within.number, dst_dir_fd=within.number)


def takes_direct(directory: int) -> bool:
    """Whether files here can be opened with O_DIRECT."""
    try:
        flags = os.O_CREAT | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
        descriptor = os.open(PROBE_NAME, flags, FILE_MODE, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            with suppress(OSError):
                os.unlink(PROBE_NAME, dir_fd=directory)
            return False
        if error.errno == errno.EROFS:
            return True
        raise
    os.close(descriptor)
    os.unlink(PROBE_NAME, dir_fd=directory)
    return True


def write_all(descriptor: int, buffers: Sequence[memoryview]) -> None:
    offset, left = 0, list(buffers)
    while left:
        written = os.pwritev(descriptor, left, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        offset += written
        left = _after(left, written)


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> bool:
    """Fill all buffers in order from the file's beginning; return whether the file was long enough."""
    offset, left = 0, list(buffers)
    while left:
        count = os.preadv(descriptor, left, offset)
        if count <= 0:
            return False
        offset += count
        left = _after(left, count)
    return True


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if buffers else []

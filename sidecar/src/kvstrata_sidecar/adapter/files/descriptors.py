"""Directories and files by their open descriptors: what the operating system does in parts is done to the end here."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o600
PROBE_NAME = ".probe"


class Directory:
    """An open directory, closed when nobody uses it any more: its number must not come to mean another one."""

    __slots__ = ("number",)

    def __init__(self, path: str | Path, *, within: Directory | None = None, follow: bool = False) -> None:
        self.number = -1
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        self.number = os.open(path, flags, dir_fd=None if within is None else within.number)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def open_directory(within: Directory, name: str) -> int:
    """Open a directory in another, no link, and return its descriptor, which the caller closes."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within.number)


def rename(within: Directory, path: str, other: str) -> None:
    """Give a file another name below the same directory; a file that has that name is replaced."""
    os.rename(path, other, src_dir_fd=within.number, dst_dir_fd=within.number)


def takes_direct(directory: int) -> bool:
    """Whether files in here can be opened past the page cache."""
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
    """Write buffers one after another from the file's beginning, however little the disk takes at once."""
    offset, left = 0, list(buffers)
    while left:
        written = os.pwritev(descriptor, left, offset)
        if written <= 0:
            raise OSError(errno.ENOSPC, "nothing was written")
        offset += written
        left = _after(left, written)


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> bool:
    """Fill buffers one after another from the file's beginning; return whether it was long enough for all."""
    offset, left = 0, list(buffers)
    while left:
        count = os.preadv(descriptor, left, offset)
        if count <= 0:
            return False
        offset += count
        left = _after(left, count)
    return True


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers of which the first `count` bytes are done."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if buffers else []

"""Memory of tiers' workers, and LMCache's memory that a disk may still read or write.

The kernel cannot call back a read or write that has begun, and a disk may never finish it. So LMCache is answered at
the deadline, and memory that it frees is kept back until the I/O has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Staging:
    """Page-aligned memory of one thread that grows on demand."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def take(self, length: int) -> memoryview:
        """Return the memory's beginning; valid until the next call. Raises MemoryError."""
        if len(self._memory) < length:
            try:
                self._memory = mmap.mmap(-1, length)
            except OSError as error:
                raise MemoryError(f"no memory for {length} bytes") from error
        return memoryview(self._memory)[:length]


class Spans:
    """Memory of LMCache under I/O; `released` is called without locks after a release. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[int, int]] = []  # address and length
        self.released: Callable[[], None] = lambda: None

    @contextmanager
    def held(self, view: memoryview) -> Iterator[None]:
        """Keep memory from reuse while a disk may touch it."""
        if (address := address_of(view)) is None:
            yield
            return
        span = address, len(view)
        with self._lock:
            self._held.append(span)
        try:
            yield
        finally:
            with self._lock:
                self._held.remove(span)
            self.released()

    def touches(self, address: int, length: int) -> bool:
        if not self._held:
            return False
        with self._lock:
            return any(start < address + length and address < start + size for start, size in self._held)


def address_of(view: memoryview) -> int | None:
    """Return the view's address in memory, None for one that is read-only or empty."""
    if view.readonly or not len(view):
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

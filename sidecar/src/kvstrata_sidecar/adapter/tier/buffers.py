"""Memory of LMCache's that a disk may still read or write.

A read or write that the kernel has begun cannot be called back, and a disk may take for ever. So LMCache is answered at
the deadline all the same, and the memory, once LMCache frees it, is kept back until the disk has let go of it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable


class Spans:
    """The spans under I/O, as (address, length). Safe to share between threads.

    `released` is called, without locks, whenever one is given back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._held: dict[int, tuple[int, int]] = {}
        self.released: Callable[[], None] = lambda: None

    def hold(self, address: int, length: int) -> int:
        """Keep a span from being given to others; return what `release` takes."""
        with self._lock:
            number = next(self._ids)
            self._held[number] = (address, length)
            return number

    def release(self, number: int) -> None:
        """Let a span go."""
        with self._lock:
            del self._held[number]
        self.released()

    def touches(self, address: int, length: int) -> bool:
        """Whether any byte of this memory is held."""
        if not self._held:
            return False
        with self._lock:
            return any(start < address + length and address < start + size for start, size in self._held.values())

    def __len__(self) -> int:
        return len(self._held)


def address_of(view: memoryview) -> int | None:
    """Return where a view begins in memory, None for one that is read-only or empty."""
    if view.readonly or not len(view):
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

"""Bytes that came with a reply's line: the beginning of a block, often. They are kept in one place and overwritten as
soon as they were poured into the block's own memory, so that no piece of a tenant's block stays in the heap.
"""

from __future__ import annotations

from collections.abc import Callable


class ReadAhead:
    """At most `capacity` bytes that were received and not yet read; `step` are asked for at a time."""

    def __init__(self, capacity: int, step: int = 4096) -> None:
        self._memory = bytearray(capacity)
        self._view = memoryview(self._memory)
        self._zeros = memoryview(bytes(capacity))
        self._step = step
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def find(self, what: bytes) -> int:
        """Return how many bytes come before `what`, -1 without it."""
        place = self._memory.find(what, self._start, self._end)
        return place - self._start if place >= 0 else -1

    def receive(self, receive_into: Callable[[memoryview], int]) -> int:
        """Have more bytes put behind what is there; return how many came. Raises BufferError when it is full."""
        if self._end + self._step > len(self._memory):
            held, end = len(self), self._end
            # A memoryview moves its bytes in place, overlapping or not, without a copy in between.
            self._view[:held] = self._view[self._start : end]
            self._wipe(held, end)
            self._start, self._end = 0, held
        if self._end == len(self._memory):
            raise BufferError("there is no room to read ahead")
        count = receive_into(self._view[self._end : self._end + self._step])
        self._end += count
        return count

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes, which are there and are no secret."""
        taken = bytes(self._view[self._start : self._start + length])
        self._advance(length)
        return taken

    def peek(self) -> bytes:
        """Return a copy of what is there: for replies, which are no secret."""
        return bytes(self._view[self._start : self._end])

    def skip(self, length: int) -> None:
        """Leave out the next `length` bytes, which are there and are no secret."""
        self._advance(length)

    def pour(self, target: memoryview) -> int:
        """Move the next bytes into `target`; return how many there were."""
        count = min(len(self), len(target))
        target[:count] = self._view[self._start : self._start + count]
        self._wipe(self._start, self._start + count)
        self._advance(count)
        return count

    def clear(self) -> None:
        """Forget what is left."""
        self._wipe(self._start, self._end)
        self._start = self._end = 0

    def _advance(self, count: int) -> None:
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def _wipe(self, start: int, end: int) -> None:
        if start < end:
            self._view[start:end] = self._zeros[: end - start]

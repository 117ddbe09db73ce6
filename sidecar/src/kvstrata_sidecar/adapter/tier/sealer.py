"""Values of blocks in a tier: the interface of a sealer, and the sealer of plain values.

A sealer builds a value's parts from LMCache's buffer, and decides whether a value that was read is the block. Deletion
Jobs import this module, and their image has no `cryptography`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstrata.contract.store.block_value import HEADER_BYTES, Header, pack_header, unpack_header, value_bytes
from kvstrata_sidecar.adapter.policy.refusal import Refusal


class Opening(Protocol):
    """One value to be read. `parts` are filled in order, the first with the header alone."""

    @property
    def parts(self) -> Sequence[memoryview]:
        """Destinations of the value's bytes; together as long as the whole value."""

    def header_holds(self) -> bool:
        """Whether the header in the first part belongs to this block, so that the rest is worth reading."""

    @property
    def damaged(self) -> bool:
        """Whether the value is no valid block and should be deleted; known after `finish`."""

    def finish(self) -> bool:
        """Whether the caller's view now holds the block; called once, when all parts are filled."""


class Sealer(Protocol):
    """Converts blocks to values and back. Each worker has its own: it may keep staging buffers."""

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        """Return why blocks of `keyspace` cannot be opened (or sealed), None if they can."""

    def value_bytes(self, body_bytes: int) -> int:
        """Return the length of a body's value."""

    def seal(self, keyspace: str, key: bytes, view: memoryview) -> Sequence[bytes | memoryview]:
        """Return the parts of the value of `key`; valid until the next call."""

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:
        """Return where to read the value of `key` so that its body ends up in `view`."""


class PlainOpening:
    __slots__ = ("_header", "_key", "_view", "parts")

    damaged = False

    def __init__(self, key: bytes, view: memoryview) -> None:
        self._key = key
        self._view = view
        self._header = bytearray(HEADER_BYTES)
        self.parts: Sequence[memoryview] = (memoryview(self._header), view)

    def header_holds(self) -> bool:
        return unpack_header(self._key, bytes(self._header)) == Header(len(self._view))

    def finish(self) -> bool:
        """Always True: a value with a matching header and length is accepted."""
        return True


class PlainSealer:
    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:  # noqa: ARG002
        return None

    def value_bytes(self, body_bytes: int) -> int:
        return value_bytes(body_bytes, encrypted=False)

    def seal(self, keyspace: str, key: bytes, view: memoryview) -> Sequence[bytes | memoryview]:  # noqa: ARG002
        return (pack_header(key, Header(len(view))), view)

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:  # noqa: ARG002
        return PlainOpening(key, view)

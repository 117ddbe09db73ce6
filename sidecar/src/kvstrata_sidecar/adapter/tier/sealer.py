"""What a block looks like on its way to a tier and back: the seam between the transport and encryption.

The transport moves the parts of a value and knows nothing of them. A sealer makes them from LMCache's buffer, and says
of what came back whether it is the block. The plain one adds the header alone and moves bytes without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstrata.contract.store.block_value import HEADER_BYTES, Header, pack_header, unpack_header, value_bytes
from kvstrata_sidecar.adapter.policy.refusal import Refusal


class Opening(Protocol):
    """One value about to be read. `parts` are filled in order, the first with the header alone."""

    @property
    def parts(self) -> Sequence[memoryview]:
        """Where the value's bytes go; together as long as the whole value."""

    def header_holds(self) -> bool:
        """Whether the header that is now in the first part belongs to this block, so that the rest is worth reading."""

    @property
    def damaged(self) -> bool:
        """Whether what was read is no block at all, so that it is better gone; known after `finish`."""

    def finish(self) -> bool:
        """Whether the caller's view now holds the block; called once, when all parts are filled."""


class Sealer(Protocol):
    """Turns blocks into values and back. Each worker has one of its own: it may keep staging buffers."""

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        """Return why blocks of `keyspace` cannot be opened, or sealed if so asked, None if they can."""

    def value_bytes(self, body_bytes: int) -> int:
        """Return how long the value of a body is."""

    def seal(self, keyspace: str, key: bytes, view: memoryview) -> Sequence[bytes | memoryview]:
        """Return the parts of the value of `key`; valid until the next call."""

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:
        """Return where to read the value of `key` so that its body ends up in `view`."""


class PlainOpening:
    """Reads the body straight into the caller's view."""

    __slots__ = ("_header", "_key", "_view", "parts")

    damaged = False

    def __init__(self, key: bytes, view: memoryview) -> None:
        self._key = key
        self._view = view
        self._header = bytearray(HEADER_BYTES)
        self.parts: Sequence[memoryview] = (memoryview(self._header), view)

    def header_holds(self) -> bool:
        """Whether this is the plain value of this key and length."""
        return unpack_header(self._key, bytes(self._header)) == Header(len(self._view))

    def finish(self) -> bool:
        """Return True: what has a right header and length is taken as it is."""
        return True


class PlainSealer:
    """Stores bodies as they are."""

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:  # noqa: ARG002
        """Refuse nothing."""
        return None

    def value_bytes(self, body_bytes: int) -> int:
        """Return the length of header and body."""
        return value_bytes(body_bytes, encrypted=False)

    def seal(self, keyspace: str, key: bytes, view: memoryview) -> Sequence[bytes | memoryview]:  # noqa: ARG002
        """Return header and body."""
        return (pack_header(key, Header(len(view))), view)

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:  # noqa: ARG002
        """Return an opening that reads into `view` itself."""
        return PlainOpening(key, view)

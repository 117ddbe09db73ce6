"""Values of blocks in a tier: the interface of a sealer.

A sealer builds a value's parts from LMCache's buffer, and decides whether a value that was read is the block. Deletion
Jobs import this module, and their image has no `cryptography`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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

    def seal(self, keyspace: str, key: bytes, view: memoryview, computed_ms: int) -> Sequence[bytes | memoryview]:
        """Return the parts of the value of `key`; valid until the next call. `computed_ms` as in Header."""

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:
        """Return where to read the value of `key` so that its body ends up in `view`."""

"""Contents of a block's file: whole pages, plain or encrypted.

A plain body goes between LMCache's memory and the disk without a copy; an encrypted one through a page-aligned staging
buffer, which holds ciphertext only.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstrata.contract.store.block_file import PAGE_BYTES, file_bytes
from kvstrata.contract.store.block_value import HEADER_BYTES, NO_NONCE, TAG_BYTES, Header, pack_header, unpack_header
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.buffers import address_of
from kvstrata_sidecar.adapter.tier.encryption import GcmSealer, SealedOpening, overwrite

CHECKSUM_KEY = b"kvstrata blocks\x00"
"""Not secret: its tag detects accidents at the speed of the processor's AES, and no attacker."""


class Verdict(Enum):
    """FOREIGN: possibly valid for another reader, so the file stays."""

    GOOD = auto()
    FOREIGN = auto()
    DAMAGED = auto()


class Pages(Protocol):
    """Converts between blocks and files for one worker. Results are valid until the next call."""

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        """Return why blocks of `keyspace` cannot be read (`seals`: written), None if they can."""

    def seal(self, keyspace: str, name: bytes, view: memoryview) -> Sequence[memoryview]:
        """Return the file's bytes for the block `name` with its body in `view`."""

    def room(self, view: memoryview) -> Sequence[memoryview]:
        """Return the buffers to read the file into, for a body that ends up in `view`."""

    def open(self, keyspace: str, name: bytes, view: memoryview) -> Verdict:
        """Verify the bytes read. Anything but the block leaves zeros in `view`."""

    def wipe(self) -> None:
        """Overwrite plaintext of the last call in our memory."""


class Staging:
    """Page-aligned memory that grows on demand."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE_BYTES)

    def take(self, length: int) -> memoryview:
        if len(self._memory) < length:
            self._memory = mmap.mmap(-1, -(-length // PAGE_BYTES) * PAGE_BYTES)
        return memoryview(self._memory)[:length]


class PlainPages:
    def __init__(self) -> None:
        self._staging = Staging()
        self._cipher = AESGCM(CHECKSUM_KEY)
        self._tag = bytearray(TAG_BYTES)
        self._dirty_bytes = 0

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:  # noqa: ARG002
        return None

    def seal(self, keyspace: str, name: bytes, view: memoryview) -> Sequence[memoryview]:  # noqa: ARG002
        """Return the body's whole pages in LMCache's memory, and our pages for the rest."""
        body, rest = self._divide(view)
        self._dirty_bytes = len(rest)
        trailer = self._staging.take(file_bytes(len(view)) - len(body))
        trailer[: len(rest)] = rest
        trailer[len(rest) : -HEADER_BYTES] = bytes(len(trailer) - len(rest) - HEADER_BYTES)
        trailer[len(rest) : len(rest) + TAG_BYTES] = self._checksum(view)
        trailer[-HEADER_BYTES:] = pack_header(name, Header(len(view)))
        return (body, trailer) if len(body) else (trailer,)

    def room(self, view: memoryview) -> Sequence[memoryview]:
        body, rest = self._divide(view)
        self._dirty_bytes = len(rest)
        trailer = self._staging.take(file_bytes(len(view)) - len(body))
        return (body, trailer) if len(body) else (trailer,)

    def open(self, keyspace: str, name: bytes, view: memoryview) -> Verdict:  # noqa: ARG002
        body, rest = self._divide(view)
        trailer = self._staging.take(file_bytes(len(view)) - len(body))
        rest[:] = trailer[: len(rest)]
        header = unpack_header(name, bytes(trailer[-HEADER_BYTES:]))
        tag = trailer[len(rest) : len(rest) + TAG_BYTES]
        padding = trailer[len(rest) + TAG_BYTES : -HEADER_BYTES]
        if header == Header(len(view)) and not any(padding) and tag == self._checksum(view):
            return Verdict.GOOD
        overwrite(view)
        return Verdict.DAMAGED

    def wipe(self) -> None:
        if self._dirty_bytes:
            overwrite(self._staging.take(self._dirty_bytes))
            self._dirty_bytes = 0

    def _divide(self, view: memoryview) -> tuple[memoryview, memoryview]:
        """Return the part that the disk reaches without a copy, and the rest."""
        address = address_of(view)
        whole = 0 if address is None or address % PAGE_BYTES else len(view) - len(view) % PAGE_BYTES
        return view[:whole], view[whole:]

    def _checksum(self, view: memoryview) -> bytearray:
        self._cipher.encrypt_into(NO_NONCE, b"", view, self._tag)
        return self._tag


class GcmPages:
    def __init__(self, keys: DataKeys) -> None:
        self._staging = Staging()
        self._sealer = GcmSealer(keys, room=self._staging.take)

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        """Refuse keyspaces without a key, and sealing with an exhausted key."""
        return self._sealer.refusal(keyspace, seals=seals)

    def seal(self, keyspace: str, name: bytes, view: memoryview) -> Sequence[memoryview]:
        """Raises NoKeyError if the key was removed meanwhile."""
        pages = self._staging.take(file_bytes(len(view)))
        header, _ = self._sealer.seal(keyspace, name, view)
        sealed_bytes = len(view) + TAG_BYTES
        pages[sealed_bytes:-HEADER_BYTES] = bytes(len(pages) - sealed_bytes - HEADER_BYTES)
        pages[-HEADER_BYTES:] = header
        return (pages,)

    def room(self, view: memoryview) -> Sequence[memoryview]:
        return (self._staging.take(file_bytes(len(view))),)

    def open(self, keyspace: str, name: bytes, view: memoryview) -> Verdict:
        pages = self._staging.take(file_bytes(len(view)))
        if any(pages[len(view) + TAG_BYTES : -HEADER_BYTES]):
            overwrite(view)
            return Verdict.DAMAGED
        opening = self._sealer.open_into(keyspace, name, view)
        opening.parts[0][:] = pages[-HEADER_BYTES:]
        if opening.finish():
            return Verdict.GOOD
        overwrite(view)
        # A malformed header is damage: the index has files of this version only.
        known = isinstance(opening, SealedOpening) and unpack_header(name, bytes(opening.parts[0])) is not None
        return Verdict.FOREIGN if known and not opening.damaged else Verdict.DAMAGED

    def wipe(self) -> None:
        """Staged bytes are ciphertext."""


def pages_for(keys: DataKeys, *, encrypt: bool) -> Callable[[], Pages]:
    return (lambda: GcmPages(keys)) if encrypt else PlainPages

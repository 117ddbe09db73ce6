"""Contents of a block's file: whole pages, plain or encrypted.

A plain body goes between LMCache's memory and the disk without a copy; an encrypted one through a page-aligned staging
buffer, which holds ciphertext only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kvstrata.contract.store.block_file import PAGE_BYTES, file_bytes
from kvstrata.contract.store.block_value import (
    HEADER_BYTES,
    TAG_BYTES,
    Header,
    is_of_later_version,
    pack_header,
    unpack_header,
)
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.tier.buffers import Staging, address_of
from kvstrata_sidecar.adapter.tier.encryption import Checksum, GcmSealer, PlainOpening, overwrite


class Verdict(Enum):
    """FOREIGN, possibly valid under another key, and LATER, of a later version: the file stays."""

    GOOD = auto()
    FOREIGN = auto()
    LATER = auto()
    DAMAGED = auto()


class PlainPages:
    """Converts between blocks and files for one worker. Results are valid until the next call."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._checksum = Checksum()
        self._dirty_bytes = 0

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:  # noqa: ARG002
        """Return why blocks of `keyspace` cannot be read (`seals`: written), None if they can."""
        return None

    def seal(self, keyspace: str, name: bytes, view: memoryview, computed_ms: int) -> Sequence[memoryview]:  # noqa: ARG002
        """Return the file's bytes for the block `name` with its body in `view`; `computed_ms` as in Header."""
        body, rest, trailer = self._divide(view)
        trailer[: len(rest)] = rest
        trailer[len(rest) : -HEADER_BYTES] = bytes(len(trailer) - len(rest) - HEADER_BYTES)
        header = pack_header(name, Header(len(view), computed_ms=computed_ms))
        trailer[len(rest) : len(rest) + TAG_BYTES] = self._checksum.of(header, view)
        trailer[-HEADER_BYTES:] = header
        return (body, trailer) if len(body) else (trailer,)

    def room(self, view: memoryview) -> Sequence[memoryview]:
        """Return the buffers to read the file into, for a body that ends up in `view`."""
        body, _, trailer = self._divide(view)
        return (body, trailer) if len(body) else (trailer,)

    def open(self, keyspace: str, name: bytes, view: memoryview) -> Verdict:  # noqa: ARG002
        """Verify the bytes read. Anything but the block leaves zeros in `view`."""
        _, rest, trailer = self._divide(view)
        rest[:] = trailer[: len(rest)]
        header = bytes(trailer[-HEADER_BYTES:])
        tag = trailer[len(rest) : len(rest) + TAG_BYTES]
        padding = trailer[len(rest) + TAG_BYTES : -HEADER_BYTES]
        opening = PlainOpening(name, view, self._checksum)
        opening.parts[0][:], opening.parts[-1][:] = header, tag
        if not any(padding) and opening.header_holds() and opening.finish():
            return Verdict.GOOD
        overwrite(view)
        return unread(name, header)

    def wipe(self) -> None:
        """Overwrite plaintext of the last call in our memory."""
        if self._dirty_bytes:
            overwrite(self._staging.take(self._dirty_bytes))
            self._dirty_bytes = 0

    def _divide(self, view: memoryview) -> tuple[memoryview, memoryview, memoryview]:
        """Return the part of the body that the disk reaches without a copy, the rest, and our pages for the latter."""
        address = address_of(view)
        whole = 0 if address is None or address % PAGE_BYTES else len(view) - len(view) % PAGE_BYTES
        self._dirty_bytes = len(view) - whole
        return view[:whole], view[whole:], self._staging.take(file_bytes(len(view)) - whole)


class GcmPages:
    """See PlainPages. Refuses keyspaces without a key, and sealing with an exhausted key."""

    def __init__(self, keys: DataKeys) -> None:
        self._sealer = GcmSealer(keys)
        self._staging = self._sealer.staging
        self.refusal = self._sealer.refusal

    def seal(self, keyspace: str, name: bytes, view: memoryview, computed_ms: int) -> Sequence[memoryview]:
        """Raises NoKeyError if the key was removed meanwhile."""
        pages = self._staging.take(file_bytes(len(view)))
        header, _ = self._sealer.seal(keyspace, name, view, computed_ms)
        sealed_bytes = len(view) + TAG_BYTES
        pages[sealed_bytes:-HEADER_BYTES] = bytes(len(pages) - sealed_bytes - HEADER_BYTES)
        pages[-HEADER_BYTES:] = header
        return (pages,)

    def room(self, view: memoryview) -> Sequence[memoryview]:
        return (self._staging.take(file_bytes(len(view))),)

    def open(self, keyspace: str, name: bytes, view: memoryview) -> Verdict:
        pages = self._staging.take(file_bytes(len(view)))
        header = bytes(pages[-HEADER_BYTES:])
        if any(pages[len(view) + TAG_BYTES : -HEADER_BYTES]):
            overwrite(view)
            return unread(name, header)
        opening = self._sealer.open_into(keyspace, name, view)
        opening.parts[0][:] = header
        if opening.finish():
            return Verdict.GOOD
        overwrite(view)
        known = unpack_header(name, header) is not None
        return Verdict.FOREIGN if known and not opening.damaged else unread(name, header)

    def wipe(self) -> None:
        """Staged bytes are ciphertext."""


Pages = PlainPages | GcmPages


def unread(name: bytes, header: bytes) -> Verdict:
    """Return the verdict on a file with this header that is not the block `name` as this version writes it."""
    return Verdict.LATER if is_of_later_version(name, header) else Verdict.DAMAGED

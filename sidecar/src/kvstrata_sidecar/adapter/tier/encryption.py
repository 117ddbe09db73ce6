"""Values of blocks in a tier: plain ones with a checksum, and AES-256-GCM in tiers that require encryption.

Encryption goes from LMCache's buffer into the worker's staging buffer, which never holds plaintext, without another
copy or allocation. Decryption writes before it has checked the tag, so a failure overwrites LMCache's buffer. The
block's full name, its length and its age are authenticated with the body: a value that was moved, cut, lengthened or
changed is a miss, even with a matching header.

The checksum of a plain value is a GMAC, because that takes a seventh of the time of a CRC with the processor's AES.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstrata.contract.store.block_value import (
    HEADER_BYTES,
    NO_NONCE,
    TAG_BYTES,
    Header,
    is_of_another_version,
    pack_header,
    unpack_header,
)
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.tier.buffers import Staging
from kvstrata_sidecar.adapter.tier.sealer import Opening, Sealer

ZEROS = bytes(1 << 20)

CHECKSUM_KEY = b"kvstrata blocks\x00"
"""Not secret: its tag detects accidents at the speed of the processor's AES, and no attacker."""


class Checksum:
    """The tag of plain values. For one thread: a result is valid until the next call."""

    def __init__(self) -> None:
        self._cipher = AESGCM(CHECKSUM_KEY)
        self._room = bytearray(HEADER_BYTES + TAG_BYTES)

    def of(self, header: bytes, body: memoryview) -> memoryview:
        self._cipher.encrypt_into(NO_NONCE, header, body, self._room)
        return memoryview(self._room)[HEADER_BYTES:]


class PlainOpening:
    __slots__ = ("_checksum", "_header", "_key", "_tag", "_view", "damaged", "parts")

    def __init__(self, key: bytes, view: memoryview, checksum: Checksum) -> None:
        self._key = key
        self._view = view
        self._checksum = checksum
        self._header, self._tag = bytearray(HEADER_BYTES), bytearray(TAG_BYTES)
        self.damaged = False
        self.parts: Sequence[memoryview] = (memoryview(self._header), view, memoryview(self._tag))

    def header_holds(self) -> bool:
        header = unpack_header(self._key, bytes(self._header))
        return header is not None and not header.encrypted and header.body_bytes == len(self._view)

    def finish(self) -> bool:
        """Verify the checksum. False, with the view overwritten, if the value is damaged."""
        if self._checksum.of(bytes(self._header), self._view) == self._tag:
            return True
        overwrite(self._view)
        self.damaged = True
        return False


class PlainSealer:
    """For one thread."""

    def __init__(self) -> None:
        self._checksum = Checksum()

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:  # noqa: ARG002
        return None

    def seal(self, keyspace: str, key: bytes, view: memoryview, computed_ms: int) -> Sequence[bytes | memoryview]:  # noqa: ARG002
        header = pack_header(key, Header(len(view), computed_ms=computed_ms))
        return (header, view, self._checksum.of(header, view))

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:  # noqa: ARG002
        return PlainOpening(key, view, self._checksum)


class NoKeyError(Exception):
    """A key was dropped between the check and its use; nothing was sent."""


class SealedOpening:
    __slots__ = ("_header", "_key", "_keys", "_keyspace", "_sealed", "_view", "damaged", "parts")

    def __init__(self, keys: DataKeys, keyspace: str, key: bytes, view: memoryview, sealed: memoryview) -> None:
        self._keys, self._keyspace, self._key, self._view, self._sealed = keys, keyspace, key, view, sealed
        self._header = bytearray(HEADER_BYTES)
        self.damaged = False
        self.parts: Sequence[memoryview] = (memoryview(self._header), sealed)

    def header_holds(self) -> bool:
        """Always True: any value of the right length may be read into the staging buffer."""
        return True

    def finish(self) -> bool:
        """Decrypt into the view. False, with the view overwritten, if it is not this block under a key held."""
        header = unpack_header(self._key, bytes(self._header))
        self.damaged = header is None and not is_of_another_version(bytes(self._header))
        if header is None or not header.encrypted or header.body_bytes != len(self._view):
            return False
        held = self._keys.opening(self._keyspace, header.generation)
        if held is None:
            return False
        with held.use() as cipher:
            if cipher is None:
                return False
            try:
                cipher.decrypt_into(header.nonce, self._sealed, header.associated_data(self._key), self._view)
            except InvalidTag:
                overwrite(self._view)
                self.damaged = True
                return False
        return True


class GcmSealer:
    """For one thread: sealed bytes are in one staging buffer."""

    def __init__(self, keys: DataKeys) -> None:
        self._keys = keys
        self.staging = Staging()

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        """Refuse keyspaces without a key, and sealing with a key that has reached its limit of blocks."""
        held = self._keys.sealing(keyspace)
        if held is None:
            return Refusal.NO_KEY
        return Refusal.KEY_SPENT if seals and held.spent else None

    def seal(self, keyspace: str, key: bytes, view: memoryview, computed_ms: int) -> Sequence[bytes | memoryview]:
        """Return header and sealed body. Raises NoKeyError if the key was dropped meanwhile."""
        sealed = self.staging.take(len(view) + TAG_BYTES)
        for _ in range(2):  # the first key may have been replaced since it was looked up
            held = self._keys.sealing(keyspace)
            nonce = held.nonce() if held is not None else None
            if held is None or nonce is None:
                break
            with held.use() as cipher:
                if cipher is not None:
                    header = Header(len(view), True, held.generation, nonce, computed_ms)
                    cipher.encrypt_into(nonce, view, header.associated_data(key), sealed)
                    return (pack_header(key, header), sealed)
        raise NoKeyError("the keyspace's data key may not be used any more")

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> SealedOpening:
        return SealedOpening(self._keys, keyspace, key, view, self.staging.take(len(view) + TAG_BYTES))


def overwrite(view: memoryview) -> None:
    """Fill a buffer with zeros without allocating another of its size."""
    for start in range(0, len(view), len(ZEROS)):
        part = view[start : start + len(ZEROS)]
        part[:] = ZEROS[: len(part)] if len(part) < len(ZEROS) else ZEROS


def sealers(keys: DataKeys, *, encrypt: bool) -> Callable[[], Sealer]:
    """Return a function that returns the calling thread's sealer."""
    local = threading.local()

    def own() -> Sealer:
        sealer: Sealer | None = getattr(local, "sealer", None)
        if sealer is None:
            sealer = local.sealer = GcmSealer(keys) if encrypt else PlainSealer()
        return sealer

    return own

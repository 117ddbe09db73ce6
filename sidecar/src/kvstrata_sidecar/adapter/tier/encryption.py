"""Values of blocks in tiers that require encryption: AES-256-GCM.

A sealer encrypts from LMCache's buffer into the worker's staging buffer, which never holds plaintext, without another
copy or allocation. Decryption writes before it has checked the tag, so a failure overwrites LMCache's buffer. The
block's full name and its length are authenticated with the body: a value that was moved, cut, lengthened or changed is
a miss, even with a matching header.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag

from kvstrata.contract.store.block_value import (
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    TAG_BYTES,
    Header,
    associated_data,
    pack_header,
    unpack_header,
    value_bytes,
)
from kvstrata_sidecar.adapter.policy.data_keys import DataKeys, HeldKey
from kvstrata_sidecar.adapter.policy.refusal import Refusal
from kvstrata_sidecar.adapter.tier.sealer import Opening, PlainSealer, Sealer

ZEROS = bytes(1 << 20)


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
        # A value that another version wrote does not count as damaged.
        self.damaged = header is None and self._header.startswith(MAGIC)
        if header is None or not header.encrypted or header.body_bytes != len(self._view):
            return False
        held = self._keys.opening(self._keyspace, header.generation)
        return held is not None and self._open(held, header)

    def _open(self, held: HeldKey, header: Header) -> bool:
        with held.use() as cipher:
            if cipher is None:
                return False
            try:
                cipher.decrypt_into(
                    header.nonce, self._sealed, associated_data(self._key, header.body_bytes), self._view
                )
            except InvalidTag:
                overwrite(self._view)
                self.damaged = True
                return False
        return True


class GcmSealer:
    """For one thread. `entropy(n)` returns n random bytes, `room(n)` n bytes of one staging buffer."""

    def __init__(
        self,
        keys: DataKeys,
        entropy: Callable[[int], bytes] = os.urandom,
        room: Callable[[int], memoryview] | None = None,
    ) -> None:
        self._keys = keys
        self._entropy = entropy
        self._staging = bytearray()
        self._room = self._own_room if room is None else room

    def refusal(self, keyspace: str, *, seals: bool = False) -> Refusal | None:
        """Refuse keyspaces without a key, and sealing with a key that has reached its limit of blocks."""
        held = self._keys.sealing(keyspace)
        if held is None:
            return Refusal.NO_KEY
        return Refusal.KEY_SPENT if seals and held.spent else None

    def value_bytes(self, body_bytes: int) -> int:
        return value_bytes(body_bytes, encrypted=True)

    def seal(self, keyspace: str, key: bytes, view: memoryview) -> Sequence[bytes | memoryview]:
        """Return header and sealed body, in the staging buffer. Raises NoKeyError if the key was dropped meanwhile."""
        sealed = self._room(len(view) + TAG_BYTES)
        nonce = self._entropy(NONCE_BYTES)
        for _ in range(2):  # the first key may have been replaced since it was looked up
            held = self._keys.sealing(keyspace)
            if held is None:
                break
            with held.use(seals=True) as cipher:
                if cipher is not None:
                    cipher.encrypt_into(nonce, view, associated_data(key, len(view)), sealed)
                    return (pack_header(key, Header(len(view), True, held.generation, nonce)), sealed)
        raise NoKeyError("the keyspace's data key may not be used any more")

    def open_into(self, keyspace: str, key: bytes, view: memoryview) -> Opening:
        """Return an opening that reads into the staging buffer; valid until the next call."""
        return SealedOpening(self._keys, keyspace, key, view, self._room(len(view) + TAG_BYTES))

    def _own_room(self, length: int) -> memoryview:
        if len(self._staging) < length:
            self._staging = bytearray(length)
        return memoryview(self._staging)[:length]


def overwrite(view: memoryview) -> None:
    """Fill a buffer with zeros without allocating another of its size."""
    for start in range(0, len(view), len(ZEROS)):
        part = view[start : start + len(ZEROS)]
        part[:] = ZEROS[: len(part)] if len(part) < len(ZEROS) else ZEROS


def sealers(keys: DataKeys, *, encrypt: bool) -> Callable[[], Sealer]:
    """Return a function that returns the calling thread's sealer."""
    if not encrypt:
        return PlainSealer
    local = threading.local()

    def own() -> Sealer:
        sealer: Sealer | None = getattr(local, "sealer", None)
        if sealer is None:
            sealer = local.sealer = GcmSealer(keys)
        return sealer

    return own

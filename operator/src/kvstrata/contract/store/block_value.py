"""The stored form of a block: a header of 40 bytes, the body, and a tag of 16 bytes if the body is encrypted.

The header has the key's generation, the body's length and a digest of the block's full name: a value that was copied,
truncated or mixed up is a miss, not another tenant's block.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

MAGIC = b"kvs2"
SEAL_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
NO_NONCE = bytes(NONCE_BYTES)
MAX_BODY_BYTES = 2**32 - 1

_ENCRYPTED = 1
_HEADER = struct.Struct(f">4sBBHI{SEAL_BYTES}s{NONCE_BYTES}s")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Header:
    """`generation`, 0 to 255, names the data key if the value is encrypted."""

    body_bytes: int
    encrypted: bool = False
    generation: int = 0
    nonce: bytes = NO_NONCE

    @property
    def value_bytes(self) -> int:
        return value_bytes(self.body_bytes, encrypted=self.encrypted)


def value_bytes(body_bytes: int, *, encrypted: bool) -> int:
    return HEADER_BYTES + body_bytes + (TAG_BYTES if encrypted else 0)


def seal(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=SEAL_BYTES).digest()


def pack_header(key: bytes, header: Header) -> bytes:
    """Return the 40 header bytes of the value of `key`. Raises ValueError for fields out of bounds."""
    if not 0 <= header.body_bytes <= MAX_BODY_BYTES or not 0 <= header.generation <= 255:
        raise ValueError("a header's body length or key generation is out of bounds")
    if len(header.nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
    flags = _ENCRYPTED if header.encrypted else 0
    return _HEADER.pack(MAGIC, flags, header.generation, 0, header.body_bytes, seal(key), header.nonce)


def unpack_header(key: bytes, data: bytes) -> Header | None:
    """Read a header; None if the value is not one of `key` that this version reads."""
    if len(data) != HEADER_BYTES:
        return None
    magic, flags, generation, reserved, body_bytes, digest, nonce = _HEADER.unpack(data)
    if magic != MAGIC or flags not in (0, _ENCRYPTED) or reserved != 0 or digest != seal(key):
        return None
    return Header(body_bytes, flags == _ENCRYPTED, generation, nonce)


def associated_data(key: bytes, body_bytes: int) -> bytes:
    """Return the data that encryption authenticates besides the body: the full name and the body's length."""
    return key + struct.pack(">I", body_bytes)

"""The stored form of a block: a header of 48 bytes, the body, and a tag of 16 bytes.

The header has the key's generation, the body's codec and length, a digest of the block's full name, and when its tokens
were computed: a value that was copied, truncated or mixed up is a miss, not another tenant's block. The tag of an
encrypted body is its GCM tag; that of a plain one is a GMAC of header and body under a constant key: a checksum, which
detects accidents and proves no authorship.

Values of other versions have another first word, `kvs` and a digit. They are misses, and so are values with an unknown
codec.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

MAGIC = b"kvs3"
_LAST_MAGIC = b"kvs9"
SEAL_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
NO_NONCE = bytes(NONCE_BYTES)
MAX_BODY_BYTES = 2**32 - 1

RAW = 0
"""The codec of a body that is stored as it is."""

_ENCRYPTED = 1
_HEADER = struct.Struct(f">4sBBBBI{SEAL_BYTES}s{NONCE_BYTES}sQ")
_ASSOCIATED = struct.Struct(">BIQ")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Header:
    """`generation`, 0 to 255, names the data key if the value is encrypted. `computed_ms` is when the block's
    tokens were computed, in milliseconds since 1970 by the writer's clock."""

    body_bytes: int
    encrypted: bool = False
    generation: int = 0
    nonce: bytes = NO_NONCE
    computed_ms: int = 0
    codec: int = RAW

    def associated_data(self, key: bytes) -> bytes:
        """Return the data that encryption authenticates besides the body: the full name and the rest of the header."""
        return key + _ASSOCIATED.pack(self.codec, self.body_bytes, self.computed_ms)


def value_bytes(body_bytes: int) -> int:
    return HEADER_BYTES + body_bytes + TAG_BYTES


def seal(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=SEAL_BYTES).digest()


def pack_header(key: bytes, header: Header) -> bytes:
    """Return the header bytes of the value of `key`. Raises ValueError for fields out of bounds."""
    if not 0 <= header.body_bytes <= MAX_BODY_BYTES or not 0 <= header.generation <= 255:
        raise ValueError("a header's body length or key generation is out of bounds")
    if len(header.nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
    if not 0 <= header.computed_ms < 2**64 or not 0 <= header.codec <= 255:
        raise ValueError("a header's moment or codec is out of bounds")
    flags = _ENCRYPTED if header.encrypted else 0
    return _HEADER.pack(
        MAGIC, flags, header.generation, header.codec, 0,
        header.body_bytes, seal(key), header.nonce, header.computed_ms,
    )  # fmt: skip


def unpack_header(key: bytes, data: bytes) -> Header | None:
    """Read a header; None if the value is not one of `key` that this version reads."""
    if len(data) != HEADER_BYTES:
        return None
    magic, flags, generation, codec, reserved, body_bytes, digest, nonce, computed_ms = _HEADER.unpack(data)
    if magic != MAGIC or flags not in (0, _ENCRYPTED) or codec != RAW or reserved != 0 or digest != seal(key):
        return None
    return Header(body_bytes, flags == _ENCRYPTED, generation, nonce, computed_ms, codec)


def is_of_another_version(data: bytes) -> bool:
    """Whether a header is one that this version does not read: of another format, or with another codec."""
    return not data.startswith(MAGIC) or _HEADER.unpack(data)[3] != RAW


def is_of_later_version(key: bytes, data: bytes) -> bool:
    """Whether a header is of a format after this one, or is the one of `key` with another codec; False for damage."""
    if not data.startswith(MAGIC):
        return MAGIC < data[: len(MAGIC)] <= _LAST_MAGIC
    return len(data) == HEADER_BYTES and is_of_another_version(data) and seal(key) in data

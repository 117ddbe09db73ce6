"""Names and sizes of blocks that are kept as files.

Below a tier's directory a block is `kvs1/<keyspace>/<identity>.<fingerprint>.<rank>.<group>.<hash>.<e|p>`: e holds an
encrypted body, p a plain one, so that a list of names is enough for an index. Names of earlier versions have no
fingerprint. While a file is being written its name has a leading dot and ends with the writer's token. A file is

    body | tag (16 bytes) | zeros | header (48 bytes), all but the zeros as in contract/store/block_value.py

rounded up to whole pages, so that it can be read and written past the kernel's page cache.

Within a process a block goes by its *key*: keyspace, resolved identity, rank, group and hash as bytes.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache

from kvstrata.contract.store.block_value import HEADER_BYTES, TAG_BYTES
from kvstrata.contract.store.redis_keys import IDENTITY_PATTERN, BlockKey, resolved

ROOT = "kvs1"
"""Holds a directory for each keyspace."""

CLOCK_FILE = "clock"
"""Beside `ROOT`: its modification time is the latest wall clock that a writer of this directory saw."""

PAGE_BYTES = 4096
TRAILER_BYTES = TAG_BYTES + HEADER_BYTES

NO_FINGERPRINT = bytes(8)
"""In keys of files that an earlier version wrote."""

_PREFIX = struct.Struct(">16s8s8sII")
_NAME = re.compile(
    rf"(?P<identity>{IDENTITY_PATTERN})"
    r"\.(?P<rank>[0-9a-f]{8})\.(?P<group>0|[1-9a-f][0-9a-f]{0,7})"
    r"\.(?P<hash>(?:[0-9a-f]{2}){1,64})\.(?P<suffix>[ep])"
)
_KEYSPACE = re.compile(r"[0-9a-f]{32}")


def key_of(keyspace: str, identity: str, rank: int, group: int, chunk_hash: bytes) -> bytes:
    """Raises ValueError or struct.error for malformed parts."""
    return _prefix(keyspace, identity, rank, group) + chunk_hash


def keyspace_of(key: bytes) -> str:
    return key[:16].hex()


def parts_of(key: bytes) -> tuple[str, int, int, bytes]:
    """Return resolved identity, rank, group and hash."""
    _, identity, fingerprint, rank, group = _PREFIX.unpack_from(key)
    return _identity(identity, fingerprint), rank, group, key[_PREFIX.size :]


def file_name(key: bytes, *, encrypted: bool) -> str:
    identity, rank, group, chunk_hash = parts_of(key)
    return f"{identity}.{rank:08x}.{group:x}.{chunk_hash.hex()}.{'e' if encrypted else 'p'}"


def temporary_name(name: str, token: str) -> str:
    return f".{name}.{token}"


def is_keyspace_directory(name: str) -> bool:
    return _KEYSPACE.fullmatch(name) is not None


def parse_file_name(keyspace: str, name: str) -> tuple[bytes, bool] | None:
    """Return a file's block and whether it is encrypted; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None or not is_keyspace_directory(keyspace):
        return None
    rank, group, chunk_hash = int(match["rank"], 16), int(match["group"], 16), bytes.fromhex(match["hash"])
    return key_of(keyspace, match["identity"], rank, group, chunk_hash), match["suffix"] == "e"


def block_name(domain: str, key: bytes) -> bytes:
    """Return the full name of a block, as in a shared tier; the header's digest and the encryption are bound to it."""
    return str(BlockKey(domain, keyspace_of(key), *parts_of(key))).encode()


def file_bytes(body_bytes: int) -> int:
    return -(-(body_bytes + TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES


@lru_cache(maxsize=4096)
def _prefix(keyspace: str, identity: str, rank: int, group: int) -> bytes:
    declared, _, fingerprint = identity.partition(".")
    raw_keyspace, raw_declared = bytes.fromhex(keyspace), bytes.fromhex(declared)
    raw_fingerprint = bytes.fromhex(fingerprint) or NO_FINGERPRINT
    if len(raw_keyspace) != 16 or len(raw_declared) != 8 or len(raw_fingerprint) != 8:
        raise ValueError("a block's keyspace has 32 hexadecimal digits, both parts of its identity 16 each")
    return _PREFIX.pack(raw_keyspace, raw_declared, raw_fingerprint, rank, group)


@lru_cache(maxsize=1024)
def _identity(declared: bytes, fingerprint: bytes) -> str:
    return declared.hex() if fingerprint == NO_FINGERPRINT else resolved(declared.hex(), fingerprint.hex())

"""Names of blocks in a shared tier.

`kvs1:<domain>:{<keyspace>:<bucket>}:<identity>:<rank>:<group>:<hash>`: the braces are Redis Cluster's hash tag, so
that a keyspace spreads over `BUCKETS` slots and everything about one bucket lives in one slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BUCKETS = 64
KEY_PREFIX = "kvs1"

_KEY = re.compile(
    rf"{KEY_PREFIX}:(?P<domain>[0-9a-f]{{16}}):\{{(?P<keyspace>[0-9a-f]{{32}}):(?P<bucket>[0-9a-f]{{2}})\}}"
    r":(?P<identity>[0-9a-f]{16}):(?P<rank>[0-9a-f]{8}):(?P<group>[0-9a-f]+):(?P<hash>[0-9a-f]+)"
)


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One block's full name: who may read it, what computed it, which tokens it holds."""

    domain: str
    keyspace: str
    identity: str
    rank: int
    group: int
    chunk_hash: bytes

    def __str__(self) -> str:
        return (
            f"{KEY_PREFIX}:{self.domain}:{{{self.keyspace}:{bucket_of(self.chunk_hash):02x}}}"
            f":{self.identity}:{self.rank:08x}:{self.group:x}:{self.chunk_hash.hex()}"
        )


def bucket_of(chunk_hash: bytes) -> int:
    """Return the bucket, 0 to 63, of a chunk: the upper six bits of its hash, which are uniform."""
    return chunk_hash[0] * BUCKETS // 256


def parse_block_key(text: str) -> BlockKey | None:
    """Return the parts of a key, or None if `text` is not one (or names a bucket that its hash denies)."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    try:
        chunk_hash = bytes.fromhex(found["hash"])
    except ValueError:
        return None
    if bucket_of(chunk_hash) != int(found["bucket"], 16):
        return None
    return BlockKey(
        found["domain"],
        found["keyspace"],
        found["identity"],
        int(found["rank"], 16),
        int(found["group"], 16),
        chunk_hash,
    )


def domain_pattern(domain: str) -> str:
    """Return the Redis ACL key pattern that covers a domain's keys and no other's."""
    return f"{KEY_PREFIX}:{domain}:*"

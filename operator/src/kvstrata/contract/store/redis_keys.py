"""Names in a shared tier.

A block is `kvs1:<domain>:{<keyspace>:<bucket>}:<identity>.<fingerprint>:<rank>:<group>:<hash>`: the braces are Redis
Cluster's hash tag, so a keyspace spreads over `BUCKETS` slots and everything about one bucket is in one slot.
`identity` is the model's declared cache identity, `fingerprint` its engine's. Names of earlier versions have no
fingerprint; no engine asks for them, and they are counted, evicted and erased like all others. The part after the
bucket's prefix is the block's *member* name in the bucket's index. The index's own names begin with `#`, which no
block's does:

* `#x` sorted set, member -> moment at which it expires; committed blocks only
* `#a` sorted set, member -> moment of its last use; committed blocks only
* `#m` hash, member -> `<bytes>:<moment at which it was computed>`; committed blocks only
* `#r` hash, member -> `<bytes>:<deadline>:<token>:<moment at which it was computed>`; reservations of writers
* `#s` hash: `used`, `held` and `lease` in bytes, `version` of the ledger that gave the lease, `retention` (the longest
  life granted to any block here), `cap` and `cap_since`, `cap_until` (a shortening under way), `tombstone` (the
  keyspace is revoked), `dropped_from`, `dropped`, `dropped_bytes` (since when, and how many values of how many bytes
  were deleted for that), `rc_at`, `rc_sum` and `rc_used` (a recount under way)

Moments are milliseconds of the server's clock, bytes are of whole values. A scope has one ledger of leases
`kvs1:<domain>:{<keyspace>}:#l` and a claim `#w` beside it, held by its current sweeper. A domain has the sorted set of
revoked keyspaces `kvs1:<domain>:{revoked}:#k` with the highest revision that revoked one, `#v`. A tier whose capacity
is divided among scopes has the hash of their grants `kvs1:<domain>:{tier}:#t`, with claims for adding it up, `#w`, for
taking back loans for a new guarantee, `#g`, and for taking back grants of keyspaces in no policy, `#d` (`-` for some
time when that was not enough). A ledger's `room` is its grant, `turn` the number of the change that granted it.
`kvs1:<domain>:{probe}:#p` never exists: on it the operator tests the permissions of an external server's user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

BUCKETS = 16
KEY_PREFIX = "kvs1"

IDENTITY_PATTERN = r"[0-9a-f]{16}(?:\.[0-9a-f]{16})?"
"""A resolved identity, or, in names of earlier versions, a declared one."""

_MEMBER = re.compile(
    rf"(?P<identity>{IDENTITY_PATTERN}):(?P<rank>[0-9a-f]{{8}}):(?P<group>[0-9a-f]+):(?P<hash>[0-9a-f]+)"
)
_KEY = re.compile(
    rf"{KEY_PREFIX}:(?P<domain>[0-9a-f]{{16}}):\{{(?P<keyspace>[0-9a-f]{{32}}):(?P<bucket>[0-9a-f]{{2}})\}}"
    r":(?P<member>.+)"
)


@dataclass(frozen=True, slots=True)
class BlockKey:
    """`identity` is the resolved one."""

    domain: str
    keyspace: str
    identity: str
    rank: int
    group: int
    chunk_hash: bytes

    @property
    def bucket(self) -> str:
        return bucket_prefix(self.domain, self.keyspace, bucket_of(self.chunk_hash))

    @property
    def member(self) -> str:
        return member_of(self.identity, self.rank, self.group, self.chunk_hash)

    def __str__(self) -> str:
        return f"{self.bucket}:{self.member}"


@lru_cache(maxsize=1024)
def resolved(identity: str, fingerprint: str) -> str:
    """Return the resolved identity, the first part of a block's name."""
    return f"{identity}.{fingerprint}"


def declared(identity: str) -> str:
    """Return the declared part of a resolved identity."""
    return identity.partition(".")[0]


def fingerprint_of(identity: str) -> str:
    """Return the fingerprint of a resolved identity, empty in names of earlier versions."""
    return identity.partition(".")[2]


def member_of(identity: str, rank: int, group: int, chunk_hash: bytes) -> str:
    return _member_prefix(identity, rank, group) + chunk_hash.hex()


@lru_cache(maxsize=1024)
def _member_prefix(identity: str, rank: int, group: int) -> str:
    return f"{identity}:{rank:08x}:{group:x}:"


def parse_member(text: str) -> tuple[str, int, int, bytes] | None:
    """Return identity, rank, group and hash of a member name; None if it is malformed."""
    found = _MEMBER.fullmatch(text)
    if found is None:
        return None
    try:
        return found["identity"], int(found["rank"], 16), int(found["group"], 16), bytes.fromhex(found["hash"])
    except ValueError:
        return None


def bucket_of(chunk_hash: bytes) -> int:
    """Return the bucket, 0 to 15: the upper four bits of the hash, which are uniform."""
    return chunk_hash[0] * BUCKETS // 256


@lru_cache(maxsize=65_536)
def bucket_prefix(domain: str, keyspace: str, bucket: int) -> str:
    """Return the common prefix of all names in a bucket, without the colon that follows."""
    return f"{KEY_PREFIX}:{domain}:{{{keyspace}:{bucket:02x}}}"


def ledger_key(domain: str, keyspace: str) -> str:
    return f"{KEY_PREFIX}:{domain}:{{{keyspace}}}:#l"


def claim_key(domain: str, keyspace: str) -> str:
    """The claim of a scope's current sweeper."""
    return f"{KEY_PREFIX}:{domain}:{{{keyspace}}}:#w"


def revoked_key(domain: str) -> str:
    return f"{KEY_PREFIX}:{domain}:{{revoked}}:#k"


def capacity_key(domain: str) -> str:
    """The grants of a tier to its scopes."""
    return f"{KEY_PREFIX}:{domain}:{{tier}}:#t"


def capacity_claim_key(domain: str, work: str) -> str:
    """The claim for work on a whole tier; `work` is its letter."""
    return f"{KEY_PREFIX}:{domain}:{{tier}}:#{work}"


def probe_key(domain: str) -> str:
    """The name for testing a user's permissions; nothing is ever stored under it."""
    return f"{KEY_PREFIX}:{domain}:{{probe}}:#p"


def parse_block_key(text: str) -> BlockKey | None:
    """Return the parts of a key; None if it is malformed or its bucket does not match its hash."""
    found = _KEY.fullmatch(text)
    member = parse_member(found["member"]) if found is not None else None
    if found is None or member is None or bucket_of(member[-1]) != int(found["bucket"], 16):
        return None
    return BlockKey(found["domain"], found["keyspace"], *member)


def domain_pattern(domain: str) -> str:
    """Return the Redis ACL key pattern that covers exactly a domain's keys."""
    return f"{KEY_PREFIX}:{domain}:*"

"""The scripts of a shared tier: atomic operations within one slot.

Each takes one key, a bucket's `#s` or a scope's `#l`; all other names follow from that key and lie in its slot. Scripts
never carry values: they only name, count, expire and unlink them, and read the byte that says whether a value is
encrypted. The server's clock is the only clock. On a full server the first write decides whether the rest is allowed,
so a script that must work there never starts with a write that may take memory.

| script | arguments | answer |
|---|---|---|
| reserve | member, bytes, token, window, keep, retention, limited, evict_before, encrypts, age | `ok`, evicted, their bytes, their ages; `present`; `tombstone`; `short`, missing, evicted, their bytes, their ages |
| commit | member, token, ttl, age, keep | `ok` or `gone` |
| abandon | member, token | 1 if the reservation existed |
| touch | members | how many existed |
| discard | members | for each 1 if it existed |
| sweep | count, cursor | expired, dead reservations, 1 if more expired, next cursor |
| audit | cursor, count, encrypts | next cursor, entries without their value, their bytes, values in plain where the tier encrypts |
| strays | `x` or `a`, position, count | next position or -1, removed |
| recount | entries that are added up at once, step | `ok`, `more` or `again`, drift of used, drift of held, strays |
| clamp | retention, since, cursor, count | `done`, `more` or `again`, next cursor, since |
| drop | count, keep | removed, left, their bytes, values deleted since the tombstone, their bytes, milliseconds since then |
| cull | cursor, count, identities | next cursor, removed, their bytes, entries left, bytes of all, 1 if there was no time for all of these |
| yield | bytes, evict_before, count | bytes yielded, ledger version, bytes evicted, how many, their ages |
| raise | bytes, version | `ok` or `void` |
| adopt | version, keep | `ok` or `newer`, lease or version |
| grant | bucket, wanted, minimum, limit, keep, divided, part of its lease that it grows by beyond the minimum at most or 0 | `ok`, bytes, version; `exhausted`, room; `unshared`, leased, room, turn; `void`, version |
| return | bucket, bytes, version | `ok` or `void` |
| rebuild | `begin`, version seen, at least, patience; or `finish`, version, keep, lease of each bucket | `void`, `busy` or `live`, version |
| share | room, turn | `ok`, leased; `void`, version |
| room | `grow`, `mark`, `leave` or `set`, keyspace, guaranteed, wanted, capacity, turn, keep, leased, given, told, age | room, turn, bytes beyond the capacity (negative: free) |
| tidy | cursor, walk, count, stale, keep | next cursor, walk, drift of the sum |
| revoke | revision, keyspaces | revision |
| claim | token, milliseconds | 1 if the claim has this token |
"""  # noqa: E501

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

Name = Literal[
    "reserve", "commit", "abandon", "touch", "discard", "sweep", "audit", "strays", "recount", "clamp", "drop", "cull",
    "yield", "raise", "adopt", "grant", "return", "rebuild", "share", "room", "tidy", "revoke",
    "claim",
]  # fmt: skip

BUCKET_SCRIPTS: tuple[Name, ...] = (
    "reserve", "commit", "abandon", "touch", "discard", "sweep", "audit", "strays", "recount", "clamp", "drop", "cull",
    "yield", "raise", "adopt",
)  # fmt: skip
LEDGER_SCRIPTS: tuple[Name, ...] = ("grant", "return", "rebuild", "share")

COMMANDS: tuple[str, ...] = (
    "asking", "auth", "cluster|slots", "eval", "evalsha", "get", "getrange", "hdel", "hexists", "hget", "hincrby",
    "hlen", "hmget", "hscan", "hset", "hvals", "info", "persist", "pexpireat", "ping", "pttl", "set", "strlen",
    "time", "unlink", "zadd", "zcard", "zmscore", "zrange", "zrem", "zscore",
)  # fmt: skip
"""Every command that the data plane's user runs, directly or in scripts; the server checks both alike."""

_COMMON = {
    **dict.fromkeys(BUCKET_SCRIPTS, "_bucket"),
    **dict.fromkeys(LEDGER_SCRIPTS, "_ledger"),
    "room": "_rooms",
    "tidy": "_rooms",
}


@dataclass(frozen=True, slots=True)
class Script:
    name: Name
    text: bytes
    sha: bytes


@cache
def script(name: Name) -> Script:
    """Return a script, preceded by its family's common part."""
    common = _COMMON.get(name)
    text = (source(common) if common else b"") + source(name)
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


def source(name: str) -> bytes:
    return resources.files(__package__).joinpath("scripts", f"{name}.lua").read_bytes()

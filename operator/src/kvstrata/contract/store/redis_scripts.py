"""The scripts of a shared tier: atomic operations within one slot.

Each takes one key: a bucket's `#s`, a scope's ledger `#l`, the tier's capacity `#t`, or a claim or set of its own. All
other names follow from that key and lie in its slot. `ARGUMENTS` names a script's other arguments, for its text and for
its callers; its file documents its answer.

Scripts never carry values: they only name, count, expire and unlink them, and read the byte that marks an encrypted
value. The server's clock is the only clock. On a full server the first write decides whether the rest is allowed, so a
script that must work there never starts with a write that may take memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "bucket": {
        "reserve": "member #size token #window_ms #keep_ms #life_ms ?limited #evict_before_ms ?encrypts #age_ms",
        "commit": "member token #ttl_ms #age_ms #keep_ms",
        "abandon": "member token",
        "touch": "*members",
        "discard": "*members",
        "sweep": "#count cursor",
        "audit": "cursor #count ?encrypts",
        "strays": "index #first #count",
        "recount": "#step",
        "clamp": "#life_ms #since cursor #count",
        "drop": "#count #keep_ms",
        "cull": "cursor #count *identities",
        "yield": "#bytes #evict_before_ms #count",
        "raise": "#bytes #of_version",
        "adopt": "#of_version #keep_ms",
    },
    "ledger": {
        "lease": "bucket #wanted #minimum #limit #keep_ms ?divided #growth_share",
        "return": "bucket #bytes #of_version",
        "grant": "#granted #sequence",
        "begin_rebuild": "#seen #at_least #patience_ms",
        "finish_rebuild": "#of_version #keep_ms *leases",
    },
    "capacity": {
        "grow": "keyspace #guaranteed #capacity #keep_ms #leased #ledger_granted #ledger_sequence #wanted",
        "charge": "keyspace #guaranteed #capacity #keep_ms #leased #ledger_granted #ledger_sequence",
        "shrink": "keyspace #guaranteed #capacity #keep_ms #granted #sequence #age_ms",
        "release": "keyspace #keep_ms #leased #ledger_granted #ledger_sequence #sequence #age_ms",
        "granted": "*keyspaces",
        "unlisted": "cursor #count #stale_ms",
        "tidy": "cursor #mine #count #stale_ms #keep_ms",
    },
    "common": {
        "revoke": "#revision *keyspaces",
        "claim": "token #life_ms",
    },
}
"""Names of arguments in their order, by the key that a script takes. `#` marks a number, `?` a flag, `*` the rest."""

COMMANDS: tuple[str, ...] = (
    "asking", "auth", "cluster|slots", "eval", "evalsha", "get", "getrange", "hdel", "hexists", "hget", "hincrby",
    "hlen", "hmget", "hscan", "hset", "hvals", "info", "persist", "pexpireat", "ping", "pttl", "set", "strlen",
    "time", "unlink", "zadd", "zcard", "zmscore", "zrange", "zrem", "zscore",
)  # fmt: skip
"""Every command that the data plane's user runs, directly or in scripts; the server checks both alike."""

_LUA = {"#": "tonumber(ARGV[{}])", "?": "ARGV[{}] == '1'", "*": "{{unpack(ARGV, {})}}", "": "ARGV[{}]"}

Argument = bytes | int | Sequence[bytes | int]


@dataclass(frozen=True, slots=True)
class Script:
    text: bytes
    sha: bytes
    names: tuple[str, ...]
    takes_rest: bool

    def words(self, arguments: Mapping[str, Argument]) -> list[bytes]:
        """Return named arguments as a server takes them. Raises KeyError for missing, TypeError for unknown ones."""
        values: list[Any] = [arguments[name] for name in self.names]
        if len(values) != len(arguments):
            raise TypeError(f"the script takes {', '.join(self.names)}")
        if self.takes_rest:
            values[-1:] = values[-1]
        return [b"%d" % one if isinstance(one, int) else one for one in values]


@cache
def script(name: str) -> Script:
    """Return a script, preceded by its family's common part and by its arguments as local variables."""
    family = next(family for family, scripts in ARGUMENTS.items() if name in scripts)
    declared = [(one.lstrip("#?*"), one[0] if one[0] in _LUA else "") for one in ARGUMENTS[family][name].split()]
    names = tuple(one for one, _ in declared)
    values = (_LUA[kind].format(number) for number, (_, kind) in enumerate(declared, 1))
    prelude = f"local {', '.join(names)} = {', '.join(values)}\n".encode()
    text = common(family) + prelude + source(name)
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
    return Script(text, sha, names, declared[-1][1] == "*")


def common(family: str) -> bytes:
    """Return the common part of a family's scripts."""
    return source("_common") + (source(f"_{family}") if family != "common" else b"")


def source(name: str) -> bytes:
    return resources.files(__package__).joinpath("scripts", f"{name}.lua").read_bytes()

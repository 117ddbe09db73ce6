"""What the user of an external server may do, found out by trying, without doing anything.

Each command of the data plane is sent once, on a key that nothing has, in a form that changes nothing: on a key that is
not there, under a condition that never holds, or with an argument that the command itself refuses. A server looks at
the user's rights before all of that, before redirections, and before it refuses writes as a replica or for want of
memory: so whatever it answers other than NOPERM means that the user may. That needs no right of its own, as ACL DRYRUN
does, and tries the very user that pods are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import exceptions

KEY = "<key>"

TRIALS: Mapping[str, tuple[str, ...]] = {
    "eval": ("EVAL", "return 1", "1", KEY),
    "evalsha": ("EVALSHA", "0" * 40, "1", KEY),
    "get": ("GET", KEY),
    "getrange": ("GETRANGE", KEY, "0", "0"),
    "hdel": ("HDEL", KEY, "f"),
    "hexists": ("HEXISTS", KEY, "f"),
    "hget": ("HGET", KEY, "f"),
    "hincrby": ("HINCRBY", KEY, "f", "no-number"),
    "hlen": ("HLEN", KEY),
    "hmget": ("HMGET", KEY, "f"),
    "hscan": ("HSCAN", KEY, "0"),
    "hset": ("HSET", KEY, "f", "v", "field-without-value"),
    "hvals": ("HVALS", KEY),
    "persist": ("PERSIST", KEY),
    "pexpireat": ("PEXPIREAT", KEY, "1"),
    "ping": ("PING",),
    "pttl": ("PTTL", KEY),
    "set": ("SET", KEY, "v", "XX", "PX", "1"),
    "strlen": ("STRLEN", KEY),
    "time": ("TIME",),
    "unlink": ("UNLINK", KEY),
    "zadd": ("ZADD", KEY, "XX", "0", "m"),
    "zcard": ("ZCARD", KEY),
    "zmscore": ("ZMSCORE", KEY, "m"),
    "zrange": ("ZRANGE", KEY, "0", "0"),
    "zrem": ("ZREM", KEY, "m"),
    "zscore": ("ZSCORE", KEY, "m"),
}
"""How each command is tried. AUTH is none of them, which everybody may; INFO and CLUSTER SLOTS are asked in earnest."""

CLUSTER_TRIALS: Mapping[str, tuple[str, ...]] = {"asking": ("ASKING",)}
"""Those that are needed in a cluster only."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Commands by why they cannot be used: at all, on the key, or because the server has none of that name."""

    refused: tuple[str, ...] = ()
    keys_refused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def trials(key: str, *, cluster: bool) -> Mapping[str, tuple[str, ...]]:
    """Return how each command is tried on `key`, by its name in access rules."""
    chosen = {**TRIALS, **(CLUSTER_TRIALS if cluster else {})}
    return {name: tuple(key if word == KEY else word for word in words) for name, words in chosen.items()}


def rights(answers: Mapping[str, Any]) -> Rights:
    """Return what the answers to commands say, by their names. An answer may be an exception of redis-py."""
    refused: list[str] = []
    keys_refused: list[str] = []
    unknown: list[str] = []
    for name, answer in answers.items():
        if isinstance(answer, exceptions.NoPermissionError):
            # "... has no permissions to run the 'get' command" (or subcommand); of keys it says other words.
            (refused if " to run " in str(answer) else keys_refused).append(name)
        elif isinstance(answer, exceptions.ResponseError) and str(answer).lower().startswith("unknown command"):
            unknown.append(name)
    return Rights(tuple(refused), tuple(keys_refused), tuple(unknown))

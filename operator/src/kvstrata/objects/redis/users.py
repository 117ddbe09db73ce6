"""The users of managed Redis servers, as the lines of their ACL file.

The file holds digests of passwords, of each user one or, while passwords change, several. The default user is off.

* `data`, the data plane's: its own domain's keys, and of commands those that it sends. It cannot list keys, because
  SCAN, RANDOMKEY and DBSIZE would show those of others. It may send scripts, in which the server checks every command
  and key as if it were sent alone.
* `admin`, the operator's: figures, settings, the cluster's topology, listing keys, and moving or dropping its domain's.
  It reads no value. It may give users rights, so what it may not is a guard against mistakes and not against its thief.
* `replication`, with which servers copy from one another. Valkey 9 moves slots with it, and checks what arrives as if
  the user had sent it: so it may write its domain's keys. What it may not read it could copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.contract.store.redis_scripts import COMMANDS
from kvstrata.contract.wire import digest_bytes

DATA_USER = "data"
ADMIN_USER = "admin"
REPLICATION_USER = "replication"
USERS = (DATA_USER, ADMIN_USER, REPLICATION_USER)

MARKER_PREFIX = "rules-"
"""Begins the name of a user that is off and stands for what all others may: a server that has it was given exactly
those rights. Servers tell rights in words of their own, Redis 7.0 not even in those that it was given, so that they
cannot be compared otherwise."""

Passwords = Mapping[str, Sequence[str]]
"""By the user, every password that admits it, the one to use first."""

_ADMIN_COMMANDS = (
    "acl|getuser", "acl|load", "acl|setuser", "auth", "command|info", "config|get", "config|set", "info",
    "memory|purge", "memory|stats", "memory|usage", "ping", "role", "scan", "time", "wait",
)  # fmt: skip
_MOVER_COMMANDS = (
    "asking", "exec", "migrate", "multi", "restore-asking", "select", "strlen", "unlink",
    "eval", "hdel", "hexists", "hget", "hincrby", "hset", "zrem", "zscore",
)  # fmt: skip
"""Moving slots key by key, for which a source comes to its target as this user, too, and taking a value that does not
go along out of its bucket's index, by the script `discard`."""

_NEVER_OF_A_CLUSTER = ("flushslots", "reset")
"""What no repair needs and would lose blocks."""

_TOPOLOGY_COMMANDS = (
    "addslots", "addslotsrange", "bumpepoch", "count-failure-reports", "countkeysinslot", "delslots", "delslotsrange",
    "failover", "flushslots", "forget", "getkeysinslot", "help", "info", "keyslot", "links", "meet", "myid", "nodes",
    "replicas", "replicate", "reset", "saveconfig", "set-config-epoch", "setslot", "shards", "slaves", "slots",
)  # fmt: skip
"""Every subcommand of CLUSTER that Redis 7.0 has. Servers refuse an ACL file with a word that they do not know, so that
those which Valkey 9 needs to move slots can be allowed only by denying all others."""

_ARRIVING_COMMANDS = (
    "del", "exec", "hdel", "hincrby", "hmset", "hset", "multi", "persist", "pexpireat", "restore", "select", "set",
    "unlink", "zadd", "zrem",
)  # fmt: skip
"""What a server sends of slots that it moves: their keys, and what the data user's writes do to them meanwhile."""

_RULES: Mapping[str, tuple[str, ...]] = {
    DATA_USER: ("-@all", *(f"+{command}" for command in COMMANDS)),
    ADMIN_USER: (
        "-@all",
        "+cluster",
        *(f"-cluster|{command}" for command in _NEVER_OF_A_CLUSTER),
        *(f"+{command}" for command in (*_ADMIN_COMMANDS, *_MOVER_COMMANDS)),
    ),
    REPLICATION_USER: (
        *("-@all", "+ping", "+psync", "+replconf", "+cluster"),
        *(f"+{command}" for command in _ARRIVING_COMMANDS),
        *(f"-cluster|{command}" for command in _TOPOLOGY_COMMANDS),
    ),
}
"""Commands by name, never by category: `@connection` holds CLIENT TRACKING, which tells every key that anybody touches,
and `@scripting` holds SCRIPT FLUSH and FUNCTION, which reach every domain's scripts."""


def users_acl(domain_id: str, passwords: Passwords) -> bytes:
    """Return the ACL file. Passwords enter it as SHA-256, which is safe for random ones of 128 bits or more."""
    lines = [
        ("user", "default", "off", "resetkeys", "resetchannels", "-@all"),
        *(("user", user, *user_rules(user, domain_id, passwords.get(user, ()))) for user in USERS),
    ]
    acl = ("\n".join(" ".join(line) for line in lines) + "\n").encode()
    marker = f"{MARKER_PREFIX}{digest_bytes(what_users_may(acl).encode())[:12]}"
    return acl + f"user {marker} off resetkeys resetchannels -@all\n".encode()


def user_words(acl: bytes) -> dict[str, tuple[str, ...]]:
    """Return the words of an ACL file by their user, as they follow its name in `ACL SETUSER`, in the file's order."""
    lines = (line.split() for line in acl.decode(errors="replace").splitlines())
    return {line[1]: tuple(line[2:]) for line in lines if len(line) > 1 and line[0] == "user"}


def user_rules(user: str, domain_id: str, passwords: Sequence[str]) -> tuple[str, ...]:
    """Return the rules of one user, as they follow its name in an ACL file and in `ACL SETUSER`."""
    keys = f"~{domain_pattern(domain_id)}"
    return ("on", *map(_digest, passwords), keys, "resetchannels", *_RULES[user])


def what_users_may(acl: bytes) -> str:
    """Return what an ACL file allows to whom, without the digests: it differs when another version, or for another
    domain, would write another file."""
    lines = acl.decode(errors="replace").splitlines()
    return "\n".join(" ".join(word for word in line.split() if not word.startswith("#")) for line in lines)


def _digest(password: str) -> str:
    return "#" + hashlib.sha256(password.encode()).hexdigest()

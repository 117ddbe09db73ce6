"""The users of managed Redis servers, as lines of their ACL file.

The file holds password digests, several per user during a rotation. The default user is off.

* `data`, the data plane's: its domain's keys, and the commands that it sends. It cannot list keys: SCAN, RANDOMKEY and
  DBSIZE would show those of others. In its scripts the server checks every command and key.
* `admin`, the operator's: figures, settings, topology, listing keys, and moving or dropping its domain's keys. It reads
  no values. It may grant rights, so its limits guard against mistakes, not against theft of its password.
* `replication`, for copies between servers. Valkey 9 moves slots with it and checks arriving keys as that user's
  commands, so it may write its domain's keys. It could copy keys that it may not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.contract.store.redis_scripts import COMMANDS
from kvstrata.contract.wire import digest_bytes

DATA_USER = "data"
ADMIN_USER = "admin"
REPLICATION_USER = "replication"
USERS = (DATA_USER, ADMIN_USER, REPLICATION_USER)

MARKER_PREFIX = "rules-"
"""Prefix of a disabled user that represents the rights of all others: a server that has it was given exactly those.
Servers report rights in their own words, Redis 7.0 not even in those that it was given, so rights cannot be
compared."""

Passwords = Mapping[str, Sequence[str]]

_ADMIN_COMMANDS = (
    "acl|getuser", "acl|load", "acl|setuser", "auth", "command|info", "config|get", "config|set", "info",
    "memory|purge", "memory|stats", "memory|usage", "ping", "role", "scan", "time", "wait",
)  # fmt: skip
_MOVER_COMMANDS = (
    "asking", "exec", "migrate", "multi", "restore-asking", "select", "strlen", "unlink",
    "eval", "hdel", "hexists", "hget", "hincrby", "hset", "zrem", "zscore",
)  # fmt: skip
"""For moving slots key by key, where the source logs in to the target as this user, and for removing a value that is
not moved from its bucket's index, by the script `discard`."""

_NEVER_OF_A_CLUSTER = ("flushslots", "reset")
"""Would lose blocks and are not needed by any repair."""

_TOPOLOGY_COMMANDS = (
    "addslots", "addslotsrange", "bumpepoch", "count-failure-reports", "countkeysinslot", "delslots", "delslotsrange",
    "failover", "flushslots", "forget", "getkeysinslot", "help", "info", "keyslot", "links", "meet", "myid", "nodes",
    "replicas", "replicate", "reset", "saveconfig", "set-config-epoch", "setslot", "shards", "slaves", "slots",
)  # fmt: skip
"""Every subcommand of CLUSTER in Redis 7.0. Servers reject an ACL file with an unknown word, so those that Valkey 9
needs to move slots can be allowed only by denying all others."""

_ARRIVING_COMMANDS = (
    "del", "exec", "hdel", "hincrby", "hmset", "hset", "multi", "persist", "pexpireat", "restore", "select", "set",
    "unlink", "zadd", "zrem",
)  # fmt: skip
"""Commands of a server that moves slots: keys, and the data user's concurrent writes."""

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
"""Commands by name, never by category: `@connection` includes CLIENT TRACKING, which shows every key in use, and
`@scripting` includes SCRIPT FLUSH and FUNCTION, which reach every domain's scripts."""


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
    """Return the words of each user in an ACL file, as in `ACL SETUSER`, in the file's order."""
    lines = (line.split() for line in acl.decode(errors="replace").splitlines())
    return {line[1]: tuple(line[2:]) for line in lines if len(line) > 1 and line[0] == "user"}


def user_rules(user: str, domain_id: str, passwords: Sequence[str]) -> tuple[str, ...]:
    """Return the rules of one user, as in an ACL file and `ACL SETUSER`."""
    keys = f"~{domain_pattern(domain_id)}"
    digests = (f"#{digest_bytes(password.encode())}" for password in passwords)
    return ("on", *digests, keys, "resetchannels", *_RULES[user])


def what_users_may(acl: bytes) -> str:
    """Return the ACL file without digests: it differs if a version or domain would write another file."""
    lines = acl.decode(errors="replace").splitlines()
    return "\n".join(" ".join(word for word in line.split() if not word.startswith("#")) for line in lines)

"""Checks of external Redis servers, over one short connection to each primary. Writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import redis.asyncio as redis
from redis import exceptions

from kvstrata.clients.redis.probe import (
    TOTAL_TIMEOUT_S,
    Access,
    Failure,
    RedisReason,
    ask,
    number,
    parse_endpoint,
    sentence_of,
)
from kvstrata.contract.store.redis_keys import probe_key
from kvstrata.model.redis.external import ExternalReport, ServerFacts

MAX_PRIMARIES = 1000
AT_ONCE = 8
SLOT_MAP = "cluster|slots"
SLOTS = 16_384
MAX_HOST_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Primary:
    """A primary as the slot map names it. `proves` is the name that its certificate must hold."""

    host: str
    port: int
    proves: str

    @property
    def address(self) -> str:
        """`host:port` or `[v6]:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def check_external(
    endpoint: str,
    server_name: str,
    access: Access,
    domain: str,
    *,
    cluster: bool,
    limit: asyncio.Semaphore,
    timeout_s: float = TOTAL_TIMEOUT_S,
) -> ExternalReport:
    """Return the report of the server at `endpoint`, in a cluster of all primaries. Raises nothing. The user must
    reach the keys of domain id `domain`; `limit` bounds the connections of this process, `timeout_s` each server."""
    questions = {"info": ("INFO",), SLOT_MAP: ("CLUSTER", "SLOTS"), **trials(probe_key(domain), cluster=cluster)}
    examine = _Examination(access, questions, cluster, timeout_s)
    async with limit:
        first, answer = await examine(endpoint, server_name)
    asked = parse_endpoint(endpoint)
    if not cluster or not first.reachable or asked is None:
        return ExternalReport((first,))
    primaries = slots_by_primary(answer, asked[0], server_name)
    if primaries is None:
        return ExternalReport((first,))
    own = asyncio.Semaphore(AT_ONCE)

    async def examined(primary: Primary) -> ServerFacts:
        if primary.address == endpoint:
            return first
        async with own, limit:
            return (await examine(primary.address, primary.proves))[0]

    facts = await asyncio.gather(*(examined(primary) for primary in primaries))
    servers = tuple(replace(found, slots=slots) for found, slots in zip(facts, primaries.values(), strict=True))
    return ExternalReport(servers or (first,), mapped=True)


def slots_by_primary(answer: Any, asked_host: str, asked_name: str) -> Mapping[Primary, int] | None:
    """Return the number of slots of each primary from an answer to CLUSTER SLOTS, or None if it is malformed. Slots
    of a server without an address are not counted. A server without a host is the one that was asked."""
    if not isinstance(answer, list):
        return None
    found: dict[Primary, int] = {}
    try:
        for first, last, server, *_ in answer:
            primary = _primary(server, asked_host, asked_name)
            if not 0 <= int(first) <= int(last) < SLOTS:
                return None
            if primary is not None:
                found[primary] = found.get(primary, 0) + int(last) - int(first) + 1
    except (TypeError, ValueError):
        return None
    return found if len(found) <= MAX_PRIMARIES else None


def _primary(server: Any, asked_host: str, asked_name: str) -> Primary | None:
    host, port, *rest = server
    about = dict(zip(rest[1][::2], rest[1][1::2], strict=False)) if len(rest) > 1 else {}
    named = str(host or "")
    if named == "?":
        named = str(about.get("ip") or "")
        if not named:
            return None
    if not 0 < int(port) < 65_536:
        return None
    if not named:
        return Primary(asked_host, int(port), asked_name)
    name = str(about.get("hostname") or named)
    return Primary(named, int(port), name) if _plausible(named) and _plausible(name) else None


def _plausible(host: str) -> bool:
    """Whether a server's claim may be handed to the resolver."""
    return len(host) <= MAX_HOST_CHARACTERS and host.isascii() and all(c.isalnum() or c in "-_.:%" for c in host)


@dataclass(frozen=True, slots=True)
class _Examination:
    access: Access
    questions: Mapping[str, tuple[str, ...]]
    cluster: bool
    timeout_s: float

    async def __call__(self, address: str, server_name: str) -> tuple[ServerFacts, Any]:
        replies = await ask(address, self.access, self._all_at_once, server_name=server_name, timeout_s=self.timeout_s)
        if isinstance(replies, Failure):
            return ServerFacts(address, reachable=False, reason=str(replies.reason), message=replies.message), None
        answers = dict(zip(self.questions, replies, strict=True))
        return _facts(address, answers, self.cluster), answers[SLOT_MAP]

    async def _all_at_once(self, client: redis.Redis) -> list[Any]:
        async with client.pipeline(transaction=False) as pipeline:
            for words in self.questions.values():
                pipeline.execute_command(*words)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers


def _facts(address: str, answers: Mapping[str, Any], cluster: bool) -> ServerFacts:
    figures: Mapping[str, Any] = answers["info"] if isinstance(answers["info"], Mapping) else {}
    if figures and not figures.get("redis_version"):
        reason = RedisReason.NOT_REDIS
        return ServerFacts(address, reachable=False, reason=str(reason), message=sentence_of(address, reason))
    may = rights({name: answer for name, answer in answers.items() if cluster or name != SLOT_MAP})
    return ServerFacts(
        address,
        reachable=True,
        reason=str(RedisReason.REACHABLE),
        message=sentence_of(address, RedisReason.REACHABLE),
        software="Valkey" if figures.get("valkey_version") else "Redis",
        version=str(figures.get("valkey_version") or figures.get("redis_version") or ""),
        is_replica=figures.get("role") == "slave",
        in_cluster_mode=_mode(figures, answers[SLOT_MAP]),
        used_bytes=number(figures, "used_memory"),
        max_bytes=number(figures, "maxmemory"),
        eviction=str(figures.get("maxmemory_policy", "")),
        refused=may.refused,
        keys_refused=may.keys_refused,
        unknown=may.unknown,
    )


def _mode(figures: Mapping[str, Any], slots: Any) -> bool | None:
    """Whether a server is in cluster mode, by INFO, or else by CLUSTER SLOTS; None if both are refused."""
    if "cluster_enabled" in figures:
        return bool(number(figures, "cluster_enabled"))
    if isinstance(slots, list):
        return True
    return False if "cluster support disabled" in str(slots) else None


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
"""How each command is tried. Every user may run AUTH; INFO and CLUSTER SLOTS are asked in earnest."""

CLUSTER_TRIALS: Mapping[str, tuple[str, ...]] = {"asking": ("ASKING",)}


@dataclass(frozen=True, slots=True)
class Rights:
    """Commands that cannot be used: at all, on the key, or because the server does not know them."""

    refused: tuple[str, ...] = ()
    keys_refused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def trials(key: str, *, cluster: bool) -> Mapping[str, tuple[str, ...]]:
    chosen = {**TRIALS, **(CLUSTER_TRIALS if cluster else {})}
    return {name: tuple(key if word == KEY else word for word in words) for name, words in chosen.items()}


def rights(answers: Mapping[str, Any]) -> Rights:
    """Evaluate the answers to commands by name. An answer may be an exception of redis-py."""
    refused: list[str] = []
    keys_refused: list[str] = []
    unknown: list[str] = []
    for name, answer in answers.items():
        if isinstance(answer, exceptions.NoPermissionError):
            # "... has no permissions to run the 'get' command" (or subcommand); the text about keys differs.
            (refused if " to run " in str(answer) else keys_refused).append(name)
        elif isinstance(answer, exceptions.ResponseError) and str(answer).lower().startswith("unknown command"):
            unknown.append(name)
    return Rights(tuple(refused), tuple(keys_refused), tuple(unknown))

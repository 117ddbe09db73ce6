"""Checks of external Redis servers, over one short connection to each primary. Writes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis import exceptions

from kvstrata.api.reasons import TierReason
from kvstrata.clients.redis import probe
from kvstrata.clients.redis.probe import Access, Failure, number, sentence_of
from kvstrata.contract.store.redis_keys import probe_key
from kvstrata.model.redis.cluster import SLOTS
from kvstrata.model.redis.external import ExternalReport, ServerFacts

log = logging.getLogger(__name__)

MAX_PRIMARIES = 1000
AT_ONCE = 8
SLOT_MAP = "cluster|slots"
MAX_HOST_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Primary:
    """A primary as the slot map names it. `proves` is the name that its certificate must hold."""

    host: str
    port: int
    proves: str

    @property
    def address(self) -> str:
        return probe.endpoint_of(self.host, self.port)


async def check_external(
    endpoint: str,
    server_name: str,
    access: Access,
    domain: str,
    *,
    cluster: bool,
    limit: asyncio.Semaphore,
    timeout_s: float = probe.TOTAL_TIMEOUT_S,
) -> ExternalReport:
    """Return the report of the server at `endpoint`, in a cluster of all primaries. Raises nothing. The user must
    reach the keys of domain id `domain`; `limit` bounds the connections of this process, `timeout_s` each server."""
    questions = {"info": ("INFO",), SLOT_MAP: ("CLUSTER", "SLOTS"), **trials(probe_key(domain), cluster=cluster)}
    ask_all = partial(probe.pipelined, commands=questions.values())

    async def examine(address: str, proves: str) -> tuple[ServerFacts, Any]:
        replies = await probe.ask(address, access, ask_all, server_name=proves, timeout_s=timeout_s)
        if isinstance(replies, Failure):
            found = replies if address == endpoint else coarse(address, replies)
            return ServerFacts(address, reachable=False, reason=str(found.reason), message=found.message), None
        answers = dict(zip(questions, replies, strict=True))
        return _facts(address, answers, cluster), answers[SLOT_MAP]

    async with limit:
        first, answer = await examine(endpoint, server_name)
    asked = probe.parse_endpoint(endpoint)
    primaries = slots_by_primary(answer, asked[0], server_name) if cluster and first.reachable and asked else None
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


def coarse(address: str, failure: Failure) -> Failure:
    """Return the failure of a server that another one names, with the network around the operator left to its log."""
    if failure.reason in (TierReason.ADDRESS_NOT_ALLOWED, *probe.OF_REDIS):
        return failure
    log.info("a server that a cluster names does not answer", extra={"address": address, "reason": failure.reason})
    message = f"{address}, which the cluster names, does not answer the operator as Redis: the operator's log has more"
    return Failure(TierReason.UNREACHABLE, message)


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


def _facts(address: str, answers: Mapping[str, Any], cluster: bool) -> ServerFacts:
    figures: Mapping[str, Any] = answers["info"] if isinstance(answers["info"], Mapping) else {}
    if figures and not figures.get("redis_version"):
        reason = TierReason.NOT_REDIS
        return ServerFacts(address, reachable=False, reason=str(reason), message=sentence_of(address, reason))
    rejected = defaultdict[str, tuple[str, ...]](tuple)
    for name, answer in answers.items():
        if cluster or name != SLOT_MAP:
            rejected[_rejection(answer)] += (name,)
    return ServerFacts(
        address,
        reachable=True,
        reason=str(TierReason.REACHABLE),
        message=sentence_of(address, TierReason.REACHABLE),
        software="Valkey" if figures.get("valkey_version") else "Redis",
        version=str(figures.get("valkey_version") or figures.get("redis_version") or ""),
        is_replica=figures.get("role") == "slave",
        in_cluster_mode=_mode(figures, answers[SLOT_MAP]),
        used_bytes=number(figures, "used_memory"),
        max_bytes=number(figures, "maxmemory"),
        eviction=str(figures.get("maxmemory_policy", "")),
        refused=rejected["refused"],
        keys_refused=rejected["keys_refused"],
        unknown=rejected["unknown"],
    )


def _rejection(answer: Any) -> str:
    """Return the field of ServerFacts for a command that is answered so, empty if it can be used."""
    if isinstance(answer, exceptions.NoPermissionError):
        # "... has no permissions to run the 'get' command" (or subcommand); the text about keys differs.
        return "refused" if " to run " in str(answer) else "keys_refused"
    lacking = isinstance(answer, exceptions.ResponseError) and str(answer).lower().startswith("unknown command")
    return "unknown" if lacking else ""


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


def trials(key: str, *, cluster: bool) -> Mapping[str, tuple[str, ...]]:
    chosen = {**TRIALS, **(CLUSTER_TRIALS if cluster else {})}
    return {name: tuple(key if word == KEY else word for word in words) for name, words in chosen.items()}

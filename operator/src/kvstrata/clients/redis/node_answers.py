"""Parsers of CLUSTER and INFO answers of Redis 7, Redis 8 and Valkey 9; missing fields are zero or empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvstrata.model.redis.cluster import Peer, Server, SlotJob, SlotRange

ENDED = frozenset(("success", "failed", "cancelled"))
"""States of an atomic migration that is over."""


class NotAnAnswerError(ValueError):
    """The answer is malformed."""


def parse_server(
    pod_uid: str, nodes: str, info: str, cluster_info: str, node_timeout_ms: int, jobs: Sequence[Any] | None
) -> Server:
    """`jobs` is None if the server does not know CLUSTER GETSLOTMIGRATIONS."""
    peers = parse_nodes(nodes)
    itself = next((peer.node_id for line, peer in zip(_lines(nodes), peers, strict=True) if _is_myself(line)), None)
    if itself is None:
        raise NotAnAnswerError("CLUSTER NODES without the server itself")
    facts, cluster = parse_fields(info), parse_fields(cluster_info)
    link_up = facts.get("master_link_status") == "up"
    return Server(
        pod_uid=pod_uid,
        node_id=itself,
        software="Valkey" if facts.get("server_name") == "valkey" else "Redis",
        version=facts.get("valkey_version") or facts.get("redis_version", ""),
        peers=peers,
        cluster_ok=cluster.get("cluster_state") == "ok",
        current_epoch=_number(cluster, "cluster_current_epoch"),
        is_primary=facts.get("role") == "master",
        link_up=link_up,
        ever_synced=link_up or _number(facts, "master_link_down_since_seconds", -1) >= 0,
        syncing=facts.get("master_sync_in_progress") == "1",
        offset=_number(facts, "slave_repl_offset" if "slave_repl_offset" in facts else "master_repl_offset"),
        used_bytes=_number(facts, "used_memory"),
        max_bytes=_number(facts, "maxmemory"),
        keys=_keys(facts),
        node_timeout_ms=node_timeout_ms,
        moves_atomically=jobs is not None,
        jobs=tuple(_jobs(itself, map(by_name, jobs or ()))),
    )


def parse_nodes(answer: str) -> tuple[Peer, ...]:
    return tuple(map(_peer, _lines(answer)))


def parse_fields(answer: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in answer.splitlines() if not line.startswith("#"))
    return {name: value.strip() for name, colon, value in pairs if colon}


def by_name(entry: Any) -> Mapping[Any, Any]:
    """Return an entry that comes as a list of names and values, or as a map."""
    return entry if isinstance(entry, Mapping) else dict(zip(entry[::2], entry[1::2], strict=True))


def _lines(answer: str) -> list[str]:
    return [line for line in answer.splitlines() if line.strip()]


def _is_myself(line: str) -> bool:
    return "myself" in line.split(" ", 3)[2].split(",")


def _peer(line: str) -> Peer:
    """One line: id, address, flags, primary, ping sent, pong received, epoch, link, slots and open slots."""
    fields = line.split()
    if len(fields) < 8:
        raise NotAnAnswerError(f"a line of CLUSTER NODES with {len(fields)} fields")
    node_id, address, flag_names, primary = fields[:4]
    flags = flag_names.split(",")
    # ip:port@cport, with the host's name and further fields behind commas.
    place, *names = address.split(",")
    ip, _, port = place.partition("@")[0].rpartition(":")
    opened = [field[1:-1] for field in fields[8:] if field.startswith("[")]
    return Peer(
        node_id=node_id,
        ip=ip.strip("[]"),
        port=_integer(port),
        hostname=names[0] if names and "=" not in names[0] else "",
        is_primary="master" in flags,
        primary=None if primary == "-" else primary,
        epoch=_integer(fields[6]),
        linked=fields[7] == "connected",
        failed="fail" in flags,
        suspected="fail?" in flags,
        handshake="handshake" in flags,
        no_address="noaddr" in flags,
        slots=tuple(_range(field) for field in fields[8:] if not field.startswith("[")),
        migrating=_open(opened, "->-"),
        importing=_open(opened, "-<-"),
    )


def _range(field: str) -> SlotRange:
    first, _, last = field.partition("-")
    return _integer(first), _integer(last or first)


def _open(fields: Iterable[str], arrow: str) -> Mapping[int, str]:
    return {_integer(slot): node_id for slot, node_id in (field.split(arrow) for field in fields if arrow in field)}


def _jobs(source: str, entries: Iterable[Mapping[str, Any]]) -> Iterator[SlotJob]:
    for entry in entries:
        exports = (entry.get("operation"), entry.get("source_node")) == ("EXPORT", source)
        if exports and entry.get("state") not in ENDED:
            slots = tuple(_range(piece) for piece in str(entry.get("slot_ranges", "")).split())
            yield SlotJob(slots, str(entry.get("target_node", "")))


def _keys(facts: Mapping[str, str]) -> int:
    """Keys of all databases: `db0:keys=3,expires=0,avg_ttl=0`."""
    databases = (value for name, value in facts.items() if name.startswith("db") and value.startswith("keys="))
    return sum(_integer(value.split(",")[0].removeprefix("keys=")) for value in databases)


def _number(facts: Mapping[str, str], name: str, absent: int = 0) -> int:
    return _integer(facts[name]) if name in facts else absent


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise NotAnAnswerError(f"not a number: {text[:40]!r}") from error

"""The most recently used blocks of a shared tier, asked scope by scope so that lookups come in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, capacity_key, parse_member
from kvstrata_sidecar.adapter.params import AdapterParams, TierParams
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.budget.capacity import TierCapacity
from kvstrata_sidecar.adapter.redis.client.commands import (
    MEMBERS_PER_COMMAND,
    Transport,
    read_moment_ms,
    read_text,
    reads_list,
)
from kvstrata_sidecar.adapter.redis.client.nodes import Topology
from kvstrata_sidecar.adapter.redis.client.resp import Command, FramingError, Reply, integer
from kvstrata_sidecar.adapter.redis.exchanges import QuestionPart, T
from kvstrata_sidecar.adapter.redis.threads import Crew
from kvstrata_sidecar.adapter.tier.counts import Counters
from kvstrata_sidecar.adapter.tier.interface import Hot, most_of_each

SCOPES_AT_ONCE = 512
"""Scopes that are asked about; those with the largest grants, in a tier whose capacity is divided."""


def busiest(transport: Transport, domain: str, keyspaces: Sequence[str]) -> list[str]:
    """Return at most `SCOPES_AT_ONCE` scopes: those with the largest grants; any, if capacity is undivided."""
    granted = TierCapacity(domain).granted(transport, keyspaces)
    order = sorted(granted, key=lambda one: -granted[one]) if granted else list(keyspaces)
    return order[:SCOPES_AT_ONCE]


def hottest(transport: Transport, domain: str, identity: str, keyspace: str, most: int) -> list[Hot]:
    """Return about `most` last used blocks of one scope and identity, without those of unreachable buckets."""
    per_bucket = max(1, -(-most // BUCKETS))
    bases = [bucket_prefix(domain, keyspace, bucket).encode() for bucket in range(BUCKETS)]
    asked = [
        Command(
            base + b":#s", (b"ZRANGE", base + b":#a", b"0", b"%d" % (per_bucket - 1), b"REV", b"WITHSCORES"), _scored
        )
        for base in bases
    ]
    now_ms, *answers = transport.ask_each([Command(bases[0] + b":#s", (b"TIME",), read_moment_ms), *asked])
    if isinstance(now_ms, Exception):
        raise now_ms
    found = {
        base: answer
        for base, answer in zip(bases, answers, strict=True)
        if not isinstance(answer, Exception) and answer
    }
    return _described(transport, identity, keyspace, found, now_ms)


class Hottest:
    """Asks one tier's servers. `refusal` returns why a keyspace may not be used now, None if it may."""

    def __init__(
        self,
        params: AdapterParams,
        tier: TierParams,
        topology: Topology,
        crew: Crew,
        refusal: Callable[[str], Refusal | None],
        counters: Counters,
    ) -> None:
        self._domain, self._identity = params.domain, params.identity
        self._patience_s = tier.load_deadline_ms / 1000
        self._topology = topology
        self._crew = crew
        self._refusal = refusal
        self._counters = counters

    def of(self, keyspaces: Sequence[str]) -> list[Hot] | None:
        """Return the last used blocks, None without a timely answer; a failure leaves out the remaining keyspaces."""
        allowed = [keyspace for keyspace in keyspaces if self._refusal(keyspace) is None]
        scopes = self._ask(None, capacity_key(self._domain), lambda one: busiest(one, self._domain, allowed))
        if scopes is None:
            return None
        found: list[Hot] = []
        for keyspace in scopes:
            told = self._ask(keyspace, bucket_prefix(self._domain, keyspace, 0), self._about(keyspace, len(scopes)))
            if told is None:
                return found or None
            found += told
        return found

    def _about(self, keyspace: str, scopes: int) -> Callable[[Transport], list[Hot]]:
        most = most_of_each(scopes)
        return lambda transport: hottest(transport, self._domain, self._identity, keyspace, most)

    def _ask(self, keyspace: str | None, key: str, question: Callable[[Transport], list[T]]) -> list[T] | None:
        """Run `question` in the lookup lane of the server that has `key`; None on failure."""
        node = self._topology.node_of(key.encode())
        part = QuestionPart(keyspace, (), lambda transport, _: question(transport), self._counters, urgent=False)
        if node is None or not node.breaker.closed or self._crew.put_lookup(part, node) is not None:
            return None
        return self._crew.answer(part, self._patience_s, "a question about hot blocks")


def _described(
    transport: Transport,
    identity: str,
    keyspace: str,
    found: Mapping[bytes, Sequence[tuple[bytes, float]]],
    now_ms: int,
) -> list[Hot]:
    """Return the blocks of this identity that are in the index, with ages. `found` has last uses by bucket."""
    pieces = [
        (base, some[start : start + MEMBERS_PER_COMMAND])
        for base, some in found.items()
        for start in range(0, len(some), MEMBERS_PER_COMMAND)
    ]
    commands = [
        Command(base + b":#s", (b"HMGET", base + b":#m", *(member for member, _ in some)), reads_list(len(some)))
        for base, some in pieces
    ]
    hot: list[Hot] = []
    for (_, some), answer in zip(pieces, transport.ask_each(commands) if commands else (), strict=True):
        if isinstance(answer, Exception):
            continue
        for (member, used_ms), entry in zip(some, answer, strict=True):
            parsed = parse_member(member.decode("utf-8", "replace"))
            if parsed is None or parsed[0] != identity or not isinstance(entry, bytes):
                continue
            _, rank, group, chunk_hash = parsed
            computed_ms = integer(entry.partition(b":")[2])
            hot.append(Hot(keyspace, rank, group, chunk_hash, used_ms, max(0.0, (now_ms - computed_ms) / 1000)))
    return hot


def _scored(reply: Reply) -> list[tuple[bytes, float]]:
    if not isinstance(reply, list) or len(reply) % 2:
        raise FramingError("an answer is no list of names and scores")
    names, scores = reply[::2], reply[1::2]
    try:
        return [(read_text(name).encode(), float(read_text(score))) for name, score in zip(names, scores, strict=True)]
    except ValueError as error:
        raise FramingError("a score is no number") from error

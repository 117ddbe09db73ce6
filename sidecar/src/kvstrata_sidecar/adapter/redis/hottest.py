"""The most recently used blocks of a shared tier, asked scope by scope so that lookups come in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, parse_member
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.redis.budget.capacity import TierCapacity
from kvstrata_sidecar.adapter.redis.client.commands import MEMBERS_PER_COMMAND, Transport, call, read_text, state_key
from kvstrata_sidecar.adapter.redis.client.resp import FramingError, Reply, integer
from kvstrata_sidecar.adapter.tier.interface import Hot

SCOPES_AT_ONCE = 512
"""Scopes that are asked about; those with the largest grants, in a tier whose capacity is divided."""


def busiest(transport: Transport, domain: str, keyspaces: Sequence[str]) -> list[str]:
    """Return at most `SCOPES_AT_ONCE` scopes: those with the largest grants; any, if capacity is undivided."""
    granted = TierCapacity(domain).granted(transport, keyspaces)
    order = sorted(granted, key=lambda one: -granted[one]) if granted else list(keyspaces)
    return order[:SCOPES_AT_ONCE]


def hottest(transport: Transport, params: AdapterParams, keyspace: str, most: int) -> list[Hot]:
    """Return about `most` last used blocks of one scope and this identity, without those of unreachable buckets."""
    per_bucket, read = max(1, -(-most // BUCKETS)), _reads_hot(params.identity, keyspace)
    states = [state_key(bucket_prefix(params.domain, keyspace, bucket).encode()) for bucket in range(BUCKETS)]
    hot: list[Hot] = []
    for first in range(0, per_bucket, MEMBERS_PER_COMMAND):
        count = min(MEMBERS_PER_COMMAND, per_bucket - first)
        answers = transport.ask_each([call("hottest", state, read, first=first, count=count) for state in states])
        if all(isinstance(answer, Exception) for answer in answers):
            raise answers[0]
        found = [one for answer in answers if not isinstance(answer, Exception) for one in answer]
        hot += found
        if not found:
            break
    return hot


def _reads_hot(identity: str, keyspace: str) -> Callable[[Reply], list[Hot]]:
    """Return a reader of a bucket's blocks, without those of other identities."""

    def read(reply: Reply) -> list[Hot]:
        if not isinstance(reply, list) or len(reply) % 3 != 1:
            raise FramingError("an answer is no list of blocks")
        now_ms, *words = (read_text(one) for one in reply)
        found = []
        for name, used_ms, computed_ms in zip(words[::3], words[1::3], words[2::3], strict=True):
            parsed = parse_member(name)
            if parsed is not None and parsed[0] == identity:
                age_s = max(0, integer(now_ms.encode()) - integer(computed_ms.encode())) / 1000
                found.append(Hot(keyspace, *parsed[1:], _number(used_ms), age_s))
        return found

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise FramingError("a score is no number") from error

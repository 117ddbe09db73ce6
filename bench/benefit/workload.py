"""Conversations with lengths and turns of a public trace, and how tenants ask them. Pure.

A conversation is a family of the Mooncake trace: as many requests, as long, at an eighth of the scale, so that a block
of the trace (512 tokens) is a chunk here (64). Its kind decides which prompt a request continues:

- chat: the request before it, all of which follows a system prompt that all tenants have in common;
- agent: an earlier request that is continued twice, so that it branches (families of three requests and more);
- RAG: the document that the conversation begins with. Tenants of a group ask about the same documents.

Every tenant has one conversation; further ones go to tenants in proportion to the rates of ServeGen's clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from bench.benefit.arms import GROUP_TENANTS, Settings

SCALE = 8
COMMON_TOKENS = 1000
"""The system prompt that all tenants' chats begin with. Its last 40 tokens fill no chunk."""

OPENING_TOKENS = 32
"""Added to it by a tenant's first request."""

MIN_TURN_TOKENS = 8
ACTIVE = 6
"""Conversations that are under way at once."""

RATES = Path(__file__).parent / "trace" / "servegen_m_large_rates.json"


class Kind(StrEnum):
    """The shape of a conversation; OPENING is a tenant's first request of all."""

    OPENING = "opening"
    CHAT = "chat"
    AGENT = "agent"
    RAG = "rag"


class Phase(StrEnum):
    """Parts of a run, besides the start: WARMING is the computation of a pool, FULL is saturation."""

    WARMING = "warming"
    OPENING = "opening"
    PACED = "paced"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text, the same wherever it has this name."""

    name: str
    tokens: int


COMMON = Segment("system", COMMON_TOKENS)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `after` is the request of the same conversation that has to be answered before, None for none."""

    number: int
    kind: Kind
    tenant: int
    segments: tuple[Segment, ...]
    after: int | None = None

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return sum(segment.tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run by phase; numbers run through."""

    opening: tuple[Request, ...]
    paced: tuple[Request, ...]
    saturating: tuple[Request, ...]

    @property
    def all(self) -> tuple[Request, ...]:
        """All of them, in their order."""
        return (*self.opening, *self.paced, *self.saturating)


Family = tuple[int, ...]
"""Lengths in tokens of the requests of one family of the trace, at this benchmark's scale."""


def families(rows: Iterable[dict[str, Any]]) -> list[Family]:
    """Return the families of a trace: requests that have their first block behind the system prompt in common."""
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        blocks = row["hash_ids"]
        found.setdefault(blocks[1] if blocks[1:] else -1 - number, []).append(-(-row["input_length"] // SCALE))
    return [tuple(lengths) for lengths in found.values()]


def shares(tenants: int) -> list[float]:
    """Return each tenant's share of the requests: rates of ServeGen's clients, taken evenly over all ranks."""
    rates: list[float] = json.loads(RATES.read_text())
    taken = [rates[(2 * tenant + 1) * len(rates) // (2 * tenants)] for tenant in range(tenants)]
    return [rate / sum(taken) for rate in taken]


def deal(tenants: int, chance: Random) -> Iterator[int]:
    """Yield the tenant of each conversation: each one once, in random order, then by their shares."""
    yield from chance.sample(range(tenants), tenants)
    weights = shares(tenants)
    while True:
        yield from chance.choices(range(tenants), weights)


def workload(settings: Settings, tenants: int, traced: Sequence[Family], seed: str) -> Workload:
    """Draw a run's requests. The same seed gives the same prompts in the same order for any number of tenants."""
    openings = tuple(
        Request(tenant, Kind.OPENING, tenant, (COMMON, Segment(f"opening-{tenant}", OPENING_TOKENS)))
        for tenant in range(min(tenants, settings.first_requests))
    )
    owners = Random(f"{seed}/tenants/{tenants}")
    dealt = deal(tenants, owners)

    def phase(name: str, count: int, first: int) -> tuple[Request, ...]:
        conversations = _conversations(f"{seed}/{name}", count, settings.max_tokens, traced)
        return _asked(conversations, dealt, tenants, owners, Random(f"{seed}/{name}/order"), first)

    paced = phase("paced", settings.paced_requests, settings.first_requests)
    full = phase("full", settings.saturating_requests, settings.first_requests + len(paced))
    return Workload(openings, paced, full)


Conversation = tuple[Kind, list[tuple[Segment, ...]]]
"""A conversation's kind and the segments of each of its prompts."""


def _conversations(seed: str, count: int, max_tokens: int, traced: Sequence[Family]) -> list[Conversation]:
    """Draw conversations until they have so many requests; of the kinds, the one with fewest comes next."""
    chance = Random(f"{seed}/lengths")
    written = dict.fromkeys((Kind.CHAT, Kind.AGENT, Kind.RAG), 0)
    drawn: list[Conversation] = []
    while sum(written.values()) < count:
        kind = min(written, key=written.__getitem__)
        paths = _paths(kind, chance.choice(traced), f"{seed}/{len(drawn)}", max_tokens)
        if paths:
            written[kind] += len(paths)
            drawn.append((kind, paths))
    return drawn


def _asked(
    conversations: Sequence[Conversation], dealt: Iterator[int], tenants: int, owners: Random, order: Random, first: int
) -> tuple[Request, ...]:
    """Return the requests of conversations, `ACTIVE` of which are under way at once; numbers begin with `first`."""
    asking = [next(dealt) for _ in conversations]
    requests: list[Request] = []
    last: dict[int, int] = {}
    done = [0] * len(conversations)
    active = list(range(min(ACTIVE, len(conversations))))
    coming = iter(range(len(active), len(conversations)))
    while active:
        chosen = order.choice(active)
        kind, paths = conversations[chosen]
        path, number = paths[done[chosen]], first + len(requests)
        owner = _group_member(asking[chosen], tenants, owners) if kind is Kind.RAG else asking[chosen]
        segments = (COMMON, *path) if kind is Kind.CHAT else path
        requests.append(Request(number, kind, owner, segments, last.get(chosen)))
        last[chosen] = number
        done[chosen] += 1
        if done[chosen] == len(paths):
            active.remove(chosen)
            active.extend([one for one in [next(coming, None)] if one is not None])
    return tuple(requests)


def _group_member(tenant: int, tenants: int, owners: Random) -> int:
    group = tenant // GROUP_TENANTS * GROUP_TENANTS
    return owners.randrange(group, min(group + GROUP_TENANTS, tenants))


def _paths(kind: Kind, family: Family, name: str, max_tokens: int) -> list[tuple[Segment, ...]]:
    """Return the segments of each request of a conversation; nothing if the family does not fit."""
    if kind is Kind.AGENT and len(family) < 3:
        return []
    # A chat's system prompt stands in the place of the trace's, which is one block.
    begin = max(MIN_TURN_TOKENS, family[0] - (512 // SCALE if kind is Kind.CHAT else 0))
    turns = [begin, *(max(MIN_TURN_TOKENS, later - earlier) for earlier, later in pairwise(family))]
    segments = [Segment(f"{name}/{number}", tokens) for number, tokens in enumerate(turns)]
    paths: list[tuple[Segment, ...]] = []
    for number, segment in enumerate(segments):
        if kind is Kind.RAG:
            question = segment if number else Segment(f"{name}/question", MIN_TURN_TOKENS)
            paths.append((segments[0], question))
        elif kind is Kind.AGENT and number:
            paths.append((*paths[(number - 1) // 2], segment))
        else:
            paths.append((*(paths[-1] if paths else ()), segment))
    longest = max(sum(segment.tokens for segment in path) for path in paths)
    room = max_tokens - 16 - (COMMON_TOKENS if kind is Kind.CHAT else 0)
    return paths if longest <= room else []

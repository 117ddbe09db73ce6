"""The replayed load: prompts of a shared prefix, continued as requests of a public trace continue theirs. Pure.

The trace (see `trace/README.md`) names the blocks of each prompt by numbers; equal numbers are equal blocks with an
equal beginning of the prompt before them. All its requests begin with one block, a system prompt. In the benchmark the
shared prefix stands in its place.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 512
"""Tokens of a block of the trace, and of a chunk of the cache server."""

PREFIX_TOKENS = 4096
PREFIX = tuple(range(1 << 20, (1 << 20) + PREFIX_TOKENS // CHUNK_TOKENS))
"""Names of the shared prefix's chunks; those of the trace are smaller numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: `tokens` long, its whole chunks in order, and the conversation that it is a turn of."""

    conversation: int
    chunks: tuple[int, ...]
    tokens: int


def load(path: Path) -> tuple[Request, ...]:
    """Read a gzipped trace, one JSON object a line."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return requests_of(json.loads(line) for line in lines)


def requests_of(rows: Iterable[dict[str, Any]]) -> tuple[Request, ...]:
    """Return the requests of a trace's rows, in their order.

    A request continues the conversation whose prompt, but for an incomplete last block, is the longest that its own
    begins with; without one it begins a conversation. Two that only begin alike are two conversations. Raises
    ValueError for a row whose length does not fit its blocks.
    """
    last_turn: dict[int, int] = {}
    """The conversation whose last whole block this is; a block's name stands for all that is before it."""
    found: list[Request] = []
    conversations = 0
    for row in rows:
        length, blocks = row["input_length"], row["hash_ids"]
        if not blocks or len(blocks) != -(-length // CHUNK_TOKENS):
            raise ValueError(f"a prompt of {length} tokens has {len(blocks)} blocks")
        own = tuple(blocks[1 : length // CHUNK_TOKENS])
        conversation = next((last_turn[block] for block in reversed(own) if block in last_turn), None)
        if conversation is None:
            conversation, conversations = conversations, conversations + 1
        if own:
            last_turn[own[-1]] = conversation
        found.append(Request(conversation, PREFIX + own, PREFIX_TOKENS + max(0, length - CHUNK_TOKENS)))
    return tuple(found)


def tenants_of(requests: Sequence[Request], tenants: int) -> list[int]:
    """Return the tenant of each request, from 0: conversations are dealt to tenants in turn, each wholly to one."""
    return [request.conversation % tenants for request in requests]

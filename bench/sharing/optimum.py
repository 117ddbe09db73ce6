"""Optimum of sharing: sets of chunks, without any cache in mind. Pure.

Tenants that share a scope need each distinct chunk of their prompts computed once and kept once. A chunk's name stands
for all tokens before it, so all later prompts of the scope find a chunk that was computed once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.sharing.trace import CHUNK_TOKENS, PREFIX, Request

GROUP_TENANTS = 8


class Mode(StrEnum):
    """How tenants share, as in policies."""

    ISOLATED = "Isolated"
    POOL = "Isolated + pool"
    GROUP = "Group"
    PUBLIC = "Public"

    def scope(self, tenant: int) -> str:
        """Return the name of the scope in which a tenant's own chunks are shared."""
        if self is Mode.PUBLIC:
            return "public"
        return f"group-{tenant // GROUP_TENANTS}" if self is Mode.GROUP else f"tenant-{tenant}"


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best that a mode allows: chunks kept, tokens computed (a pool's warm-up included), tokens of all prompts."""

    chunks: int
    prefill_tokens: int
    prompt_tokens: int
    hit_tokens: int
    """Tokens of tenants' prompts that need not be computed."""


def optimum(requests: Sequence[Request], tenants: Sequence[int], mode: Mode) -> Optimum:
    """Return the optimum for these requests of these tenants; a pool is warm before the first."""
    shared = frozenset(PREFIX) if mode is Mode.POOL else frozenset[int]()
    kept: dict[Hashable, set[int]] = {}
    asked = last_tokens = 0
    for request, tenant in zip(requests, tenants, strict=True):
        own = kept.setdefault(mode.scope(tenant), set())
        # An engine needs the logits of the last token: of a prompt that is there as a whole it computes that one.
        whole = request.tokens == CHUNK_TOKENS * len(request.chunks)
        last_tokens += whole and own.union(shared).issuperset(request.chunks)
        own.update(set(request.chunks) - shared)
        asked += len(request.chunks)
    chunks = sum(map(len, kept.values()))
    # Of each chunk that a scope keeps its first request found nothing, and all others found it.
    hits = CHUNK_TOKENS * (asked - chunks) - last_tokens
    prompts = sum(request.tokens for request in requests)
    warmed = CHUNK_TOKENS * len(shared)
    return Optimum(chunks + len(shared), prompts - hits + warmed, prompts, hits)

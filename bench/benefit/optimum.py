"""Bounds of hits and of computed tokens: sets of names, without any cache in mind. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bench.benefit.arms import Arm
from bench.benefit.workload import COMMON, COMMON_TOKENS, Request

BLOCK_TOKENS = 32
"""Tokens of a block of the engine's own memory: the unit of the hits that it reports."""


@dataclass(frozen=True, slots=True)
class Least:
    """Tokens that a run computes at least, with an unlimited cache of whole chunks; includes a pool's warm-up."""

    prompt_tokens: int
    computed_tokens: int

    @property
    def hit_rate(self) -> float:
        """The best share of prompt tokens that are found."""
        return 1 - self.computed_tokens / self.prompt_tokens


def least(requests: Sequence[Request], arm: Arm, chunk_tokens: int) -> Least:
    """Return the optimum of requests that are asked one after another."""
    held: dict[str, set[tuple[tuple[str, ...], int]]] = {}
    pool = set(_chunks((COMMON.name,), (COMMON_TOKENS,), chunk_tokens)) if arm is Arm.POOL else set()
    computed = COMMON_TOKENS if arm is Arm.POOL else 0
    for request in requests:
        own = held.setdefault(arm.scope(request.tenant), set())
        names, lengths = zip(*((one.name, one.tokens) for one in request.segments), strict=True)
        chunks = _chunks(names, lengths, chunk_tokens)
        found = 0
        while found < len(chunks) and (chunks[found] in own or chunks[found] in pool):
            found += 1
        hit = 0 if arm is Arm.NO_REUSE else min(found * chunk_tokens, request.tokens - 1)
        computed += request.tokens - hit
        own.update(chunks)
    return Least(sum(request.tokens for request in requests), computed)


def _chunks(names: Sequence[str], lengths: Sequence[int], chunk_tokens: int) -> list[tuple[tuple[str, ...], int]]:
    """Return names of a prompt's whole chunks: all segments up to the one that a chunk ends in, and its number."""
    chunks: list[tuple[tuple[str, ...], int]] = []
    end = 0
    for number, length in enumerate(lengths, 1):
        end += length
        while (len(chunks) + 1) * chunk_tokens <= end:
            chunks.append((tuple(names[:number]), len(chunks)))
    return chunks


def allowed(request: Request, others: Collection[Request], arm: Arm, scope_of: Arm) -> int:
    """Return how many tokens a request may find at most: those in common with others of its scope.

    The scope is that of `scope_of`: an arm of isolated tenants there shows the tokens that `arm` takes from others.
    """
    own = [one for one in others if scope_of.scope(one.tenant) == scope_of.scope(request.tenant)]
    most = max((_in_common(request, one) for one in own), default=0)
    if arm is Arm.POOL and request.segments[0] == COMMON:
        most = max(most, COMMON_TOKENS)
    return most // BLOCK_TOKENS * BLOCK_TOKENS


def _in_common(one: Request, other: Request) -> int:
    tokens = 0
    for mine, its in zip(one.segments, other.segments, strict=False):
        if mine != its:
            break
        tokens += mine.tokens
    return tokens

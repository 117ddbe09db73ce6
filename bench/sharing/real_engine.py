"""A few tenants on the real engine: tokens computed with a pool and without, and whether its answers are the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.adapter.stand import Redis
from bench.sharing.optimum import Mode
from bench.sharing.scopes import Scopes
from bench.sharing.stand import Stand, erase, held
from e2e.cluster.progress import ClusterError
from kvstrata.contract.policy.pools import PoolState
from tests.dataplane.engine_process import CHUNK_TOKENS, EngineProcess

TENANTS = 4
SUFFIX_TOKENS = 200
PREFIX_IDS = tuple(Random(7).choices(range(3, 259), k=1024))
"""Tokens of the shared prefix: the random model has one for each byte, after three special ones."""

OUTPUT_TOKENS, TOP = 8, 5
OUTSIDE = "0" * 32
"""A keyspace that no policy allows: nothing is stored under it or found, so its answers are computed as a whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The engine's answer: tokens with their alternatives' log probabilities, and its own count of cached tokens."""

    tokens: tuple[str, ...]
    logprobs: tuple[dict[str, float], ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """The same prompts, one a tenant, without any cache, each tenant for itself, and with a pool."""

    uncached: tuple[Answer, ...]
    isolated: tuple[Answer, ...]
    pooled: tuple[Answer, ...]
    isolated_blocks: int
    pooled_blocks: int
    warm_up_tokens: int

    @property
    def equal(self) -> int:
        """How many of the pool's answers have the tokens of those that were computed without a cache."""
        return sum(a.tokens == b.tokens for a, b in zip(self.uncached, self.pooled, strict=True))

    @property
    def logprob_difference(self) -> float:
        """The largest difference of a log probability between the two, over all tokens that both name."""
        pairs = zip(self.uncached, self.pooled, strict=True)
        places = (place for a, b in pairs for place in zip(a.logprobs, b.logprobs, strict=True))
        return max(abs(a[token] - b[token]) for a, b in places for token in a.keys() & b.keys())

    @staticmethod
    def prefill_tokens(answers: Sequence[Answer]) -> int:
        """Tokens that the engine had to compute, by its own count."""
        return sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)


class RealEngine:
    """The real engine before a cache server of its own, with chunks of `CHUNK_TOKENS`."""

    def __init__(self, python: Path, directory: Path, backing: Redis) -> None:
        self._backing = backing
        self.stand = Stand(
            python, directory / "pod", backing, memory_gb=0.2, chunk_tokens=CHUNK_TOKENS, prefix=PREFIX_IDS
        )
        self._engine = EngineProcess(python, directory / "pod", self.stand.server.rpc_port)

    def wait_until_ready(self) -> None:
        """Wait for the cache server and the engine."""
        self.stand.wait_until_ready()
        self._engine.wait_until_ready()

    def serve(self) -> Served:
        """Serve the prompts three times. Raises ClusterError if the engine does not report its counts."""
        random = Random(11)
        prompts = [(*PREFIX_IDS, *random.choices(range(3, 259), k=SUFFIX_TOKENS)) for _ in range(TENANTS)]
        uncached = [self._ask(prompt, OUTSIDE) for prompt in prompts]
        isolated, isolated_blocks, _ = self._round(prompts, Mode.ISOLATED)
        pooled, pooled_blocks, warm_up = self._round(prompts, Mode.POOL)
        return Served(tuple(uncached), isolated, pooled, isolated_blocks, pooled_blocks, warm_up)

    def stop(self) -> None:
        """End both."""
        self._engine.stop()
        self.stand.stop()

    def _round(self, prompts: Sequence[Sequence[int]], mode: Mode) -> tuple[tuple[Answer, ...], int, int]:
        """Return answers, blocks in the tier, and tokens that the warm-up computed."""
        scopes, gate, warm_up = Scopes.drawn(mode, TENANTS), self.stand.gate, 0
        if scopes.pool:
            gate.enforce(scopes, PoolState.WARMING)
            warmed = self._ask(PREFIX_IDS, scopes.pool, output_tokens=1)
            warm_up = warmed.prompt_tokens - warmed.cached_tokens
            self._blocks(scopes)
        gate.enforce(scopes)
        answers = tuple(self._ask(one, salt) for one, salt in zip(prompts, scopes.keyspaces, strict=True))
        blocks = self._blocks(scopes)
        erase(self._backing, scopes.all)
        self.stand.forget_memory()
        return answers, blocks, warm_up

    def _blocks(self, scopes: Scopes) -> int:
        """Count blocks in the tier when no more come: the engine answers before it has stored."""
        seen, blocks = -1, 0
        while blocks != seen or not blocks:
            seen = blocks
            time.sleep(1)
            self.stand.quiet()
            blocks = sum(map(len, held(self._backing, scopes.all).chunks.values()))
        return blocks

    def _ask(self, prompt: Sequence[int], salt: str, output_tokens: int = OUTPUT_TOKENS) -> Answer:
        body: dict[str, Any] = {"prompt": list(prompt), "cache_salt": salt, "max_tokens": output_tokens}
        completion = self._engine.completion(**body, logprobs=TOP, ignore_eos=True)
        try:
            usage, logprobs = completion["usage"], completion["choices"][0]["logprobs"]
            details = usage.get("prompt_tokens_details") or {}
            return Answer(
                tuple(logprobs["tokens"]), tuple(logprobs["top_logprobs"]),
                usage["prompt_tokens"], details.get("cached_tokens") or 0,
            )  # fmt: skip
        except (KeyError, IndexError, TypeError) as error:
            raise ClusterError(f"the engine's answer lacks {error!r}") from error

"""Prompts that no tenant has sent before, and whether a replica finds their blocks.

A lookup that is late on a busy machine is a miss by design, and the engine keeps the blocks that it computes then. So
after a miss another prompt is asked for, and each prompt shows at most once which blocks a replica finds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator

from .calls import Answer, Replica
from .kubectl import LIMIT_S

PROMPT_TOKENS = 900
QUESTION_TOKENS = 200
CHUNK_TOKENS = 64
WHOLE_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
"""Tokens of the prompt that fill whole chunks; the tokenizer of the tiny model makes one token of each byte."""

STORE_SETTLES_S = 2.0
"""Blocks are stored behind the answer; they are in the shared tier after this."""


def fresh_text(about: str, tokens: int) -> str:
    """Return a text of so many tokens that is random from its first character on, so that no tenant has sent it."""
    filler = "The quick brown fox jumps over the lazy dog. "
    return f"{secrets.token_urlsafe(12)} {about}. {filler * (tokens // len(filler) + 1)}"[:tokens]


def fresh_prompt(about: str) -> str:
    """Return a prompt of 900 tokens that no tenant has sent before."""
    return fresh_text(about, PROMPT_TOKENS)


def stored(where: Replica, key: str, about: str, count: int = 1) -> list[str]:
    """Let a tenant ask a replica for new prompts; return them once they may be in the shared tier."""
    prompts = [fresh_prompt(about) for _ in range(count)]
    for prompt in prompts:
        found = where.found(key, prompt)
        assert found == 0, f"a prompt that no tenant has sent before found {found} tokens on {where.pod}"
    time.sleep(STORE_SETTLES_S)
    return prompts


def newly_stored(where: Replica, key: str, about: str, count: int = 1) -> Iterator[str]:
    """Yield prompts without end, `count` of which are stored at a time."""
    while True:
        yield from stored(where, key, about, count)


def questions(where: Replica, key: str, prefix: str) -> Iterator[str]:
    """Yield prompts that begin with a prefix, without end; a tenant has just asked the replica for each."""
    while True:
        question = prefix + fresh_text("Where does the book of rivers stand?", QUESTION_TOKENS)
        where.ask(key, question)
        time.sleep(STORE_SETTLES_S)
        yield question


def finds(where: Replica, key: str, prompts: Iterable[str]) -> tuple[str, Answer]:
    """Ask a replica for one prompt after the other; return the first whose blocks are all found, and its answer.

    Raises AssertionError if there are no more prompts, or after `LIMIT_S`.
    """
    found, until = [], time.monotonic() + LIMIT_S
    for prompt in prompts:
        answer = where.ask(key, prompt)
        if answer.cached_tokens >= len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS:
            return prompt, answer
        found.append(answer.cached_tokens)
        if time.monotonic() > until:
            break
    raise AssertionError(f"{where.pod} found {found} tokens of {len(found)} prompts, and never all of one")


def shared(
    leads: Replica, follows: Replica, key: str, about: str, count: int = 1, reader: str | None = None
) -> list[str]:
    """Return new prompts that a tenant asked one replica for, and that it or `reader` found on another.

    Their blocks are in the memory of both engines from then on, and in the shared tier.
    """
    prompts = newly_stored(leads, key, about, count)
    return [finds(follows, reader or key, prompts)[0] for _ in range(count)]

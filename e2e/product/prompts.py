"""Prompts that no tenant has sent before, and whether a replica finds their blocks.

Their tokens are counted without a tokenizer, and their answers are known. A prompt repeats one sentence with a few
random words. Each word is one token of the demo's model, with the space before it, and so is each comma and full stop.
The model continues the sentence with the same words: small differences of its numbers change no answer, and a block of
another prompt does.

A lookup that is late on a busy machine is a miss by design, and the engine keeps the blocks that it computes then. So
after a miss another prompt is asked for, and each prompt shows at most once which blocks a replica finds.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from .calls import Answer, ChatAnswer, Replica
from .kubectl import LIMIT_S

CHUNK_TOKENS = 64
PROMPT_TOKENS = 193
"""Three chunks and the beginning of a fourth, because an engine on a CPU computes some 500 tokens in a second."""

WHOLE_CHUNKS = 3 * CHUNK_TOKENS
"""Tokens of a prompt that fill whole chunks."""

QUESTION_TOKENS = 100
"""Of a tenant's text after a shared prefix: more than a chunk."""

TOKEN_BYTES = 46_080
"""KV of one token: 2 * 30 layers * 3 KV heads * 64 * 4 bytes."""

CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES

STORE_SETTLES_S = 2.0
"""Blocks are stored behind the answer; they are in the shared tier after this."""

LONG_STORE_SETTLES_S = 5 * STORE_SETTLES_S
"""The same for a text of a thousand tokens, whose blocks have 44 MB."""

WORDS = (
    "apple", "basket", "bread", "bridge", "button", "camera", "candle", "castle", "circle", "dinner", "doctor",
    "dragon", "eagle", "engine", "finger", "flower", "forest", "garden", "guitar", "hammer", "horse", "iron", "island",
    "jacket", "kitchen", "ladder", "letter", "market", "mirror", "mountain", "music", "needle", "ocean", "orange",
    "paper", "pencil", "pillow", "planet", "pocket", "queen", "rabbit", "ribbon", "river", "rocket", "school", "silver",
    "soldier", "stone", "summer", "table", "teacher", "ticket", "tiger", "tower", "tunnel", "uncle", "valley",
    "village", "wagon", "water", "wheel", "window", "winter", "yellow",
)  # fmt: skip

WATER_TOKEN = 913
"""The token of ` water`."""

Chat = tuple[Mapping[str, str], ...]

_Asked = TypeVar("_Asked")
_Given = TypeVar("_Given", Answer, ChatAnswer)

_TOKEN = re.compile(r" \w+|[,.]")
_SENTENCE_TOKENS = 21


def fresh_prompt(tokens: int = PROMPT_TOKENS) -> str:
    """Return a prompt of so many tokens that no tenant has sent before, not even its first block."""
    first, second, third, fourth, fifth, sixth = random.sample(WORDS, 6)
    sentence = f" My friends like the {first}, the {second}, the {third}, the {fourth}, the {fifth} and the {sixth}."
    return _text(_TOKEN.findall(sentence), 0, tokens)


def continuation(prompt: str, tokens: int) -> str:
    """Return the next tokens of a prompt's sentence: the model's answer, or a caller's text after a prefix."""
    known = _TOKEN.findall(prompt)
    return _text(known[:_SENTENCE_TOKENS], len(known), tokens)


def beginning(prompt: str, tokens: int) -> str:
    """Return the first tokens of a prompt."""
    return "".join(_TOKEN.findall(prompt)[:tokens])


def whole_chunks(tokens: int) -> int:
    """Return how many of a prompt's tokens fill whole chunks."""
    return tokens // CHUNK_TOKENS * CHUNK_TOKENS


def stored(where: Replica, key: str, count: int = 1) -> list[str]:
    """Let a tenant ask a replica for new prompts; return them once they may be in the shared tier."""
    prompts = [fresh_prompt() for _ in range(count)]
    for prompt in prompts:
        found = where.found(key, prompt)
        assert found == 0, f"a prompt that no tenant has sent before found {found} tokens on {where.pod}"
    time.sleep(STORE_SETTLES_S)
    return prompts


def newly_stored(where: Replica, key: str, count: int = 1) -> Iterator[str]:
    """Yield prompts without end, `count` of which are stored at a time."""
    while True:
        yield from stored(where, key, count)


def questions(where: Replica, key: str, prefix: str) -> Iterator[str]:
    """Yield prompts that begin with a prefix, without end; a tenant has just asked the replica for each."""
    while True:
        question = prefix + fresh_prompt(QUESTION_TOKENS)
        where.ask(key, question)
        time.sleep(STORE_SETTLES_S)
        yield question


def finds(where: Replica, key: str, prompts: Iterable[str]) -> tuple[str, Answer]:
    """Ask a replica for one prompt after the other; return the first whose blocks are all found, and its answer.

    Raises AssertionError if there are no more prompts, or after `LIMIT_S`.
    """
    return _first_found(where, ((prompt, where.ask(key, prompt)) for prompt in prompts))


def finds_chat(where: Replica, key: str, chats: Iterable[Chat]) -> tuple[Chat, ChatAnswer]:
    """Do the same with chats."""
    return _first_found(where, ((chat, where.chat(key, *chat)) for chat in chats))


def shared(leads: Replica, follows: Replica, key: str, count: int = 1, reader: str | None = None) -> list[str]:
    """Return new prompts that a tenant asked one replica for, and that it or `reader` found on another.

    Their blocks are in the memory of both engines from then on, and in the shared tier.
    """
    prompts = newly_stored(leads, key, count)
    return [finds(follows, reader or key, prompts)[0] for _ in range(count)]


def _first_found(where: Replica, asked: Iterable[tuple[_Asked, _Given]]) -> tuple[_Asked, _Given]:
    found, until = [], time.monotonic() + LIMIT_S
    for one, answer in asked:
        # An engine computes the last token of a prompt in any case.
        if answer.cached_tokens >= whole_chunks(answer.prompt_tokens - 1):
            return one, answer
        found.append(answer.cached_tokens)
        if time.monotonic() > until:
            break
    raise AssertionError(f"{where.pod} found {found} tokens of {len(found)} prompts, and never all of one")


def _text(sentence: Sequence[str], begin: int, tokens: int) -> str:
    return "".join(sentence[number % _SENTENCE_TOKENS] for number in range(begin, begin + tokens))

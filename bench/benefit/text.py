"""Text of any number of tokens from a seed: common words that are one token each. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

from bench.benefit.workload import Segment

_WORD = re.compile("Ġ[a-z]{3,}")
_COMMONEST = 20_000
"""Lower token ids are more frequent. Those merge the same way wherever they stand."""


def words(tokenizer: Path) -> list[str]:
    """Return the words, each with a space before it, that are single tokens of a byte-level BPE tokenizer's file."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    return sorted(
        " " + word[1:] for word, number in vocabulary.items() if number < _COMMONEST and _WORD.fullmatch(word)
    )


def text(segments: Sequence[Segment], seed: str, vocabulary: Sequence[str]) -> str:
    """Return a prompt: for each segment as many words as it has tokens, decided by its name and the seed alone."""
    return "".join("".join(Random(f"{seed}/{one.name}").choices(vocabulary, k=one.tokens)) for one in segments)

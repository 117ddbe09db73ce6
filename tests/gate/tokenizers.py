"""Tokenizers as tables of merges, as byte-pair encodings are: the first pair of the table that is there is merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


class Merges:
    """Characters are tokens; a pair of the table becomes one token, in the table's order."""

    def __init__(self, table: Iterable[tuple[str, str]]) -> None:
        self._ranks = {pair: rank for rank, pair in enumerate(table)}
        self._names: dict[str, int] = {}
        self._texts: list[str] = []

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        parts = list(text)
        while True:
            pairs = [(self._ranks.get((a, b)), at) for at, (a, b) in enumerate(pairwise(parts))]
            ranked = [(rank, at) for rank, at in pairs if rank is not None]
            if not ranked:
                return [self._id(part) for part in parts]
            _, at = min(ranked)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens that it has made."""
        return "".join(self._texts[one] for one in ids)

    def _id(self, part: str) -> int:
        if part not in self._names:
            self._names[part] = len(self._texts)
            self._texts.append(part)
        return self._names[part]

"""Results of pure functions, kept across snapshots of the world."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """The newest result of each computation, with its inputs. `inputs` must be all that the computation reads. Objects
    of the world are immutable, so equal inputs give equal results."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: Hashable, inputs: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return the result stored under `name` if it came from these `inputs`, else `compute()`."""
        known = self._known.get(name)
        # Tuples compare members by identity first, so unchanged inputs cost little.
        if known is not None and known[0] == inputs:
            found: T = known[1]
            return found
        result = compute()
        self._known[name] = (inputs, result)
        return result

    def forget(self, *names: Hashable) -> None:
        for name in names:
            self._known.pop(name, None)

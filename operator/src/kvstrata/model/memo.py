"""Results of pure functions, kept from one snapshot of the world to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """The newest result of each computation, with the inputs that it came from.

    A plan may ask it for what it would otherwise compute anew, as long as `inputs` are all that the computation reads:
    then the answer is the same with and without it. Objects of the world never change, so an input that is the same
    object, or is equal, gives the same result.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: Hashable, inputs: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return the result known under `name` if it came from these `inputs`, else `compute()`."""
        known = self._known.get(name)
        # Tuples compare their members by identity first, so this costs little while nothing has changed.
        if known is not None and known[0] == inputs:
            found: T = known[1]
            return found
        result = compute()
        self._known[name] = (inputs, result)
        return result

    def forget(self, *names: Hashable) -> None:
        """Drop what is known under `names`."""
        for name in names:
            self._known.pop(name, None)

"""Room for batches of blocks. LMCache (0.5.6) allocates memory for all blocks of a load or a store together, and gives
the batch up if it has too little. It waits here until the evictor has made room, and is then tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

WITHIN_S = 0.2
"""How long a batch waits, and with it the loop of LMCache that needs it."""


@dataclass(eq=False, slots=True)
class Batch:
    """So many blocks that wait; `answered` is set when there is as much room as there can be."""

    blocks: int
    answered: threading.Event = field(default_factory=threading.Event)


class Room:
    """Replaces the manager's `reserve_write` from `begin` to `close`. Thread-safe."""

    def __init__(self, manager: Any, no_memory: object, store_tag: str) -> None:
        self._manager = manager
        self._no_memory = no_memory
        self._store_tag = store_tag
        self._lock = threading.Lock()
        self._waiting: list[Batch] = []

    def begin(
        self, wake: Callable[[], object], lost: Callable[[], object], unwritable: Callable[..., Collection[Any]]
    ) -> None:
        """Start. `wake` requests a turn of the evictor, and `lost` is called for each batch that got no memory.
        `unwritable(keys, load=…)` returns the blocks that get none in any case."""
        self._wake, self._lost, self._unwritable = wake, lost, unwritable
        self._reserve: Callable[..., dict[Any, Any]] = self._manager.reserve_write
        self._manager.reserve_write = self.reserve_write

    def close(self) -> None:
        self._manager.__dict__.pop("reserve_write", None)
        for batch in self.take():
            batch.answered.set()

    def take(self) -> list[Batch]:
        """Return, once, the batches that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting

    def reserve_write(
        self, keys: Sequence[Any], is_temporary: Sequence[bool], *layout: Any, **tag: Any
    ) -> dict[Any, Any]:
        """Replaces LMCache's function, which reserves memory and answers by key. Nothing is locked meanwhile."""
        refused = self._unwritable(keys, load=tag.get("tag") != self._store_tag)
        if refused:
            kept = [key not in refused for key in keys]
            keys, is_temporary = list(compress(keys, kept)), list(compress(is_temporary, kept))
        answers = self._reserve_or_wait(keys, is_temporary, *layout, **tag)
        return answers | dict.fromkeys(refused, (self._no_memory, None))

    def _reserve_or_wait(
        self, keys: Sequence[Any], is_temporary: Sequence[bool], *layout: Any, **tag: Any
    ) -> dict[Any, Any]:
        answers = self._reserve(keys, is_temporary, *layout, **tag)
        lacking = {key for key, (error, _) in answers.items() if error == self._no_memory}
        if not lacking:
            return answers
        batch = Batch(len(lacking))
        with self._lock:
            self._waiting.append(batch)
        self._wake()
        batch.answered.wait(WITHIN_S)
        again = [key in lacking for key in keys]
        answers |= self._reserve(list(compress(keys, again)), list(compress(is_temporary, again)), *layout, **tag)
        if any(answers[key][0] == self._no_memory for key in lacking):
            self._lost()
        return answers

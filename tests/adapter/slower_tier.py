"""A slower tier, played: what it was handed it keeps when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Task, TaskKind


@dataclass
class Copying:
    """Blocks that a tier was handed and has not answered for."""

    blocks: Sequence[Block]
    views: Sequence[memoryview]
    within_s: float
    done: Callable[[Task], None]


@dataclass(eq=False)
class SlowerTier:
    """`tells` is whether it says what it holds without being asked, as files do; `kept` are blocks' bytes by key."""

    tells: bool = True
    per_pod: bool = True
    life: float | Callable[[Block], float] = float("inf")
    is_open: bool = True
    kept: dict[Any, bytes] = field(default_factory=dict)
    handed: list[Copying] = field(default_factory=list)
    waiting: list[Copying] = field(default_factory=list)

    def life_s(self, block: Block) -> float:
        return self.life(block) if callable(self.life) else self.life

    def takes(self, block: Block) -> bool:
        return self.is_open

    def holds(self, keyspace: str, block: Block) -> bool:
        assert keyspace == block.keyspace
        return self.tells and block.key in self.kept

    def hand_down(
        self, blocks: Sequence[Block], views: Sequence[memoryview], within_s: float, done: Callable[[Task], None]
    ) -> None:
        copying = Copying(blocks, views, within_s, done)
        self.handed.append(copying)
        self.waiting.append(copying)

    def answer(self, *, succeed: bool = True) -> None:
        """Answer for all that was handed down: what was there already counts as found, and was not written."""
        while self.waiting:
            copying = self.waiting.pop(0)
            task = Task(1, TaskKind.STORE, 0.0, bytearray(len(copying.blocks)), 0)
            for number, (block, view) in enumerate(zip(copying.blocks, copying.views, strict=True)):
                if not succeed:
                    continue
                task.found[number] = 1
                if block.key not in self.kept:
                    self.kept[block.key] = bytes(view)
                    task.keys.append(block.key)
                    task.sizes.append(len(view))
            copying.done(task)

    def handed_keys(self) -> list[Any]:
        return [block.key for copying in self.handed for block in copying.blocks]

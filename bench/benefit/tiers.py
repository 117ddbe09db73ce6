"""Time to the first token of prompts that are computed, and of the same prompts out of each tier, on one pod."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.benefit.arms import Arm, Settings
from bench.benefit.fleet import Fleet, Installed, running
from bench.benefit.gates import key_of
from bench.benefit.http import complete
from bench.benefit.programs import MODEL
from bench.benefit.text import text
from bench.benefit.workload import Segment
from bench.machine import Busyness
from e2e.cluster.progress import ClusterError
from tests.dataplane.conftest import file_tier

COMPUTED, OWN, MEMORY, REDIS, FILES = "computed", "engine", "memory", "redis", "nvme"
"""Where a prompt's blocks come from. OWN is the engine's memory."""

LENGTHS = (64, 128, 256, 512, 1024, 1984)
"""Tokens that are restored, whole chunks; the prompt has a few more."""

MORE_TOKENS = 8
ROUNDS = 3
FILES_BYTES = 4 << 30


async def tiers_measured(
    settings: Settings, installed: Installed, vocabulary: Sequence[str], seed: str, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure all lengths in random order on a pod with a tier in Redis, and on one with files."""
    rows: list[dict[str, Any]] = []
    with Busyness() as machine:
        for backing, tier_of in ((REDIS, None), (FILES, _files)):
            report(f"prefill and restores, {backing}")
            with tempfile.TemporaryDirectory(prefix="kvb-") as name:
                tier = tier_of(Path(name)) if tier_of else None
                async with running(Arm.ISOLATED, 1, 1, settings, installed, Path(name), tier) as fleet:
                    rows += await _Pod(fleet, settings, vocabulary, f"{seed}/{backing}", backing).measure()
    return {
        "rows": rows, "others_percent": round(machine.others_percent, 1), "load_average": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def _files(directory: Path) -> dict[str, Any]:
    folder = directory / "files"
    folder.mkdir()
    return file_tier(folder, name="shared", capacity_bytes=FILES_BYTES, encryption="Required")


class _Pod:
    """Asks one pod for the same prompt again and again, each time with one memory less that has it."""

    def __init__(self, fleet: Fleet, settings: Settings, vocabulary: Sequence[str], seed: str, backing: str) -> None:
        self._fleet, self._settings, self._seed = fleet, settings, seed
        self._vocabulary, self._backing = vocabulary, backing
        self._pod = fleet.pods[0]

    async def measure(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number in range(-1, ROUNDS):
            lengths = list(LENGTHS[:1] if number < 0 else LENGTHS)
            Random(f"{self._seed}/{number}").shuffle(lengths)
            for length in lengths:
                found = await self._length(length, f"{number}/{length}")
                rows += found if number >= 0 else []  # the first warms up
        return rows

    async def _length(self, length: int, name: str) -> list[dict[str, Any]]:
        gate, pod = self._pod.gate, self._pod
        assert gate is not None  # noqa: S101
        prompt = text([Segment(name, length + MORE_TOKENS)], self._seed, self._vocabulary)
        rows = [await self._ask(prompt, COMPUTED, length), await self._ask(prompt, OWN, length)]
        await gate.reset_engine()
        rows.append(await self._ask(prompt, MEMORY, length))
        await gate.reset_engine()
        await pod.forget_memory()
        rows.append(await self._ask(prompt, self._backing, length))
        await gate.reset_engine()
        await pod.forget_memory()
        return rows

    async def _ask(self, prompt: str, source: str, length: int) -> dict[str, Any]:
        meter = self._fleet.meter
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        first_cpu: list[float] = []
        before = meter.total()
        answer = await complete(self._pod.callers, body, key_of(0), lambda: first_cpu.append(meter.total() - before))
        await self._fleet.rest()
        # The engine's own memory has blocks of 32 tokens, one of them may be whole behind the last chunk.
        if answer.cached_tokens // 64 * 64 != (0 if source == COMPUTED else length):
            raise ClusterError(f"of {length} tokens {answer.cached_tokens} came from {source}")
        return {
            "tokens": length, "source": source, "first_s": round(answer.first_s, 4),
            "first_cpu_s": round(first_cpu[0], 4), "whole_cpu_s": round(meter.total() - before, 4),
        }  # fmt: skip

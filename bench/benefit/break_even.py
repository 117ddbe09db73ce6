"""From which length and bandwidth on restoring a prompt beats computing it: curves, and the formula for GPUs. Pure.

Restoring n tokens takes o + n * B / W seconds (B bytes a token, W bytes per second, o a fixed cost), computing them
p(n). So restoring pays above the bandwidth W* = n * B / (p(n) - o). Without attention's quadratic part and the fixed
costs, p(n) = n * 2 * P / (F * u), with P active parameters, F floating point operations per second and u the used share
of them: W* = B * F * u / (2 * P).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPUTED = "computed"
TOKEN_BYTES = 46_080
"""Of SmolLM2-135M in float32: 2 * 30 layers * 3 KV heads * 64 * 4 bytes."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Median seconds to the first token by number of tokens, elapsed and of processors."""

    tokens: tuple[int, ...]
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return the curve of each source."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in rows:
        found.setdefault(row["source"], {}).setdefault(row["tokens"], []).append((row["first_s"], row["first_cpu_s"]))
    return {
        source: Curve(
            tuple(sorted(by_tokens)),
            tuple(statistics.median(wall for wall, _ in by_tokens[one]) for one in sorted(by_tokens)),
            tuple(statistics.median(cpu for _, cpu in by_tokens[one]) for one in sorted(by_tokens)),
        )
        for source, by_tokens in found.items()
    }


def break_even_tokens(
    computing_s: Sequence[float], restoring_s: Sequence[float], tokens: Sequence[int]
) -> float | None:
    """Return the length from which restoring is faster at all measured lengths; None if it is not even at the last.

    Between two lengths the difference is taken as linear. At the first length it is that length: shorter prompts than
    a chunk are never restored.
    """
    gains = [computed - restored for computed, restored in zip(computing_s, restoring_s, strict=True)]
    if gains[-1] <= 0:
        return None
    at = len(gains) - 1
    while at and gains[at - 1] > 0:
        at -= 1
    if not at:
        return float(tokens[0])
    share = -gains[at - 1] / (gains[at] - gains[at - 1])
    return tokens[at - 1] + share * (tokens[at] - tokens[at - 1])


def line(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return fixed seconds and seconds a token, by least squares; neither is less than 0."""
    slope, fixed = statistics.linear_regression(tokens, seconds)
    return max(0.0, fixed), max(0.0, slope)


def bandwidth(curve: Curve) -> float:
    """Return the bytes per second at which a tier restores beyond its fixed cost; infinite if more costs no more."""
    _, slope_s = line(curve.tokens, curve.wall_s)
    return TOKEN_BYTES / slope_s if slope_s else float("inf")


def break_even_bandwidth(
    tokens: int, computing_s: float, fixed_s: float, token_bytes: int = TOKEN_BYTES
) -> float | None:
    """Return W*, in bytes per second; None where the fixed cost alone is more than computing takes."""
    return tokens * token_bytes / (computing_s - fixed_s) if computing_s > fixed_s else None


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A model on a machine: KV bytes a token, active parameters, peak operations per second (dense bf16)."""

    name: str
    token_bytes: int
    parameters: float
    peak_flops: float


UTILISATION = 0.4
ACCELERATORS = (
    Accelerator("Llama-3-8B on one A100", 131_072, 8.03e9, 312e12),
    Accelerator("Llama-3-8B on one H100", 131_072, 8.03e9, 989e12),
    Accelerator("Llama-3-70B on four H100", 327_680, 70.6e9, 4 * 989e12),
    Accelerator("Llama-3-70B on eight H100", 327_680, 70.6e9, 8 * 989e12),
)


def derived_bandwidth(one: Accelerator, utilisation: float = UTILISATION) -> float:
    """Return W* = B * F * u / (2 * P), in bytes per second: derived, not measured."""
    return one.token_bytes * one.peak_flops * utilisation / (2 * one.parameters)

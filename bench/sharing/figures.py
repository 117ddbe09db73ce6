"""Figures and table of the measurements, and the points of the plot. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.result import Figure
from bench.sharing.cost import Cost
from bench.sharing.optimum import GROUP_TENANTS, Mode
from bench.sharing.real_engine import TENANTS, Served
from bench.sharing.replay import Replay
from bench.sharing.trace import CHUNK_TOKENS, PREFIX_TOKENS

MIB = 1 << 20
SHORT = {Mode.ISOLATED: "isolated", Mode.POOL: "pool", Mode.GROUP: "group", Mode.PUBLIC: "public"}


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one mode and number of tenants, each beside the arithmetic optimum."""

    hit_rate: float
    best_hit_rate: float
    stored_bytes: int
    best_bytes: int
    prefill_tokens: int
    best_prefill_tokens: int


Points = Mapping[tuple[Mode, int], Point]


def points(replays: Sequence[Replay], token_bytes: int) -> Points:
    """Return the point of each replay; a token takes so many bytes."""
    return {
        (one.mode, one.tenants): Point(
            one.hit_rate, one.best.hit_tokens / one.best.prompt_tokens,
            one.stored_bytes, one.best.chunks * CHUNK_TOKENS * token_bytes,
            one.prefill_tokens, one.best.prefill_tokens,
        )
        for one in replays
    }  # fmt: skip


def replay_figures(replays: Sequence[Replay], token_bytes: int) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Return figures of all modes, and those of isolated tenants, which all are compared with."""
    cells = points(replays, token_bytes)
    largest = max(one.tenants for one in replays)
    stored = [cell.stored_bytes / cell.best_bytes for cell in cells.values()]
    prefill = [cell.prefill_tokens / cell.best_prefill_tokens for cell in cells.values()]
    figures = {
        "stored_of_best_max": Figure(max(stored), "ratio"),
        "stored_of_best_min": Figure(min(stored), "ratio"),
        "prefill_of_best_max": Figure(max(prefill), "ratio"),
        "prefill_of_best_min": Figure(min(prefill), "ratio"),
        "usage_report_difference": Figure(max(abs(one.reported_bytes - one.stored_bytes) for one in replays), "bytes"),
    }
    isolated: dict[str, Figure] = {}
    for one in replays:
        if one.tenants == largest:
            name = SHORT[one.mode]
            of_mode = isolated if one.mode is Mode.ISOLATED else figures
            of_mode[f"{name}_hit_rate"] = Figure(100 * one.hit_rate, "%")
            of_mode[f"{name}_stored"] = Figure(one.stored_bytes, "bytes")
            of_mode[f"{name}_prefill"] = Figure(one.prefill_tokens, "tokens")
            if one.prefix_copies is not None:
                of_mode[f"{name}_prefix_copies"] = Figure(one.prefix_copies, "copies")
    return figures, isolated


def memory_figures(replays: Sequence[Replay], token_bytes: int) -> dict[str, Figure]:
    """Return the figures of replays whose tier is the cache server's memory."""
    cells = points(replays, token_bytes).values()
    return {
        "memory_stored_of_best_max": Figure(max(one.stored_bytes / one.best_bytes for one in cells), "ratio"),
        "memory_stored_of_best_min": Figure(min(one.stored_bytes / one.best_bytes for one in cells), "ratio"),
        "memory_prefill_of_best_max": Figure(
            max(one.prefill_tokens / one.best_prefill_tokens for one in cells), "ratio"
        ),
        "memory_prefill_of_best_min": Figure(
            min(one.prefill_tokens / one.best_prefill_tokens for one in cells), "ratio"
        ),
        "memory_usage_report_difference": Figure(
            max(abs(one.reported_bytes - one.stored_bytes) for one in replays), "bytes"
        ),
    }


def costs_of(costs: Mapping[str, Cost]) -> dict[str, Figure]:
    """Return, for each tier, the cost of a hit in the pool as a share of a private hit's, and that hit's cost."""
    figures = {}
    for name, cost in costs.items():
        figures[f"{name}_pool_hit_cpu_of_private"] = Figure(cost.cpu_ratio, "ratio")
        figures[f"{name}_pool_hit_of_private"] = Figure(cost.wall_ratio, "ratio")
        figures[f"{name}_private_hit_cpu"] = Figure(1000 * statistics.median(hit.cpu_s for hit in cost.private), "ms")
        figures[f"{name}_private_hit"] = Figure(1000 * statistics.median(hit.wall_s for hit in cost.private), "ms")
    return figures


def engine_figures(served: Served) -> dict[str, Figure]:
    """Return figures of the real engine: computed tokens and equal answers."""
    return {
        "engine_outputs_equal": Figure(100 * served.equal / TENANTS, "%"),
        "engine_logprob_difference": Figure(served.logprob_difference, "nats"),
        "engine_cached_tokens": Figure(sum(answer.cached_tokens for answer in served.pooled), "tokens"),
        "engine_isolated_prefill": Figure(served.prefill_tokens(served.isolated), "tokens"),
        "engine_pool_prefill": Figure(served.prefill_tokens(served.pooled) + served.warm_up_tokens, "tokens"),
        "engine_isolated_blocks": Figure(served.isolated_blocks, "blocks"),
        "engine_pool_blocks": Figure(served.pooled_blocks, "blocks"),
    }


def table(cells: Points, requests: int, token_bytes: int, reproduce: str) -> str:
    """Return all points as a Markdown table, a row for each number of tenants and mode."""
    block_kib = CHUNK_TOKENS * token_bytes // 1024
    conditions = (
        f"{requests} prompts of an excerpt of the Mooncake conversation trace behind a shared prefix of "
        f"{PREFIX_TOKENS:,} tokens, dealt to tenants by conversation; groups have up to {GROUP_TENANTS} tenants; "
        f"chunks have {CHUNK_TOKENS} tokens and {block_kib} KiB. Written by `{reproduce}`; it is explained in "
        "[Benchmarks](../../docs/development/benchmarks.md#sharing)."
    )
    lines = [
        "# Sharing, measured", "", conditions, "",
        "![Hit rate and stored bytes by number of tenants](sharing.svg)", "",
        "| tenants | mode | hit rate | at best | stored, MiB | at best | prefill tokens | at best |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for mode, tenants in sorted(cells, key=lambda cell: (cell[1], list(Mode).index(cell[0]))):
        one = cells[mode, tenants]
        lines.append(
            f"| {tenants} | {mode} | {one.hit_rate:.1%} | {one.best_hit_rate:.1%} "
            f"| {one.stored_bytes / MIB:.2f} | {one.best_bytes / MIB:.2f} "
            f"| {one.prefill_tokens:,} | {one.best_prefill_tokens:,} |"
        )
    return "\n".join(lines) + "\n"


def series(cells: Points) -> dict[Mode, dict[str, list[float]]]:
    """Return the lines that `picture` draws: for each mode, its points by number of tenants."""
    lines: dict[Mode, dict[str, list[float]]] = {}
    for mode in Mode:
        own = [(tenants, one) for (of, tenants), one in sorted(cells.items()) if of is mode]
        if own:
            lines[mode] = {
                "tenants": [tenants for tenants, _ in own],
                "hit_percent": [100 * one.hit_rate for _, one in own],
                "stored_mib": [one.stored_bytes / MIB for _, one in own],
            }
    return lines

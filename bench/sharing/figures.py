"""Figures, table and plot of what was measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from bench.result import Figure
from bench.sharing.cost import Cost
from bench.sharing.optimum import GROUP_TENANTS, Mode
from bench.sharing.picture import Point, Points, plot, table
from bench.sharing.real_engine import TENANTS, Served
from bench.sharing.replay import Replay
from bench.sharing.trace import CHUNK_TOKENS, PREFIX_TOKENS

SHORT = {Mode.ISOLATED: "isolated", Mode.POOL: "pool", Mode.GROUP: "group", Mode.PUBLIC: "public"}


def points(replays: Sequence[Replay], token_bytes: int) -> Points:
    """Return what is shown of each replay; a token takes so many bytes."""
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
    """Return, for each tier, what a hit in the pool costs of a private one, and what that costs."""
    figures = {}
    for name, cost in costs.items():
        figures[f"{name}_pool_hit_cpu_of_private"] = Figure(cost.cpu_ratio, "ratio")
        figures[f"{name}_pool_hit_of_private"] = Figure(cost.wall_ratio, "ratio")
        figures[f"{name}_private_hit_cpu"] = Figure(1000 * statistics.median(hit.cpu_s for hit in cost.private), "ms")
        figures[f"{name}_private_hit"] = Figure(1000 * statistics.median(hit.wall_s for hit in cost.private), "ms")
    return figures


def engine_figures(served: Served) -> dict[str, Figure]:
    """Return what the real engine computed and answered."""
    return {
        "engine_outputs_equal": Figure(100 * served.equal / TENANTS, "%"),
        "engine_logprob_difference": Figure(served.logprob_difference, "nats"),
        "engine_cached_tokens": Figure(sum(answer.cached_tokens for answer in served.pooled), "tokens"),
        "engine_isolated_prefill": Figure(served.prefill_tokens(served.isolated), "tokens"),
        "engine_pool_prefill": Figure(served.prefill_tokens(served.pooled) + served.warm_up_tokens, "tokens"),
        "engine_isolated_blocks": Figure(served.isolated_blocks, "blocks"),
        "engine_pool_blocks": Figure(served.pooled_blocks, "blocks"),
    }


def documents(replays: Sequence[Replay], token_bytes: int, requests: int, reproduce: str) -> dict[str, str]:
    """Return the table and the plot, by the endings of their files' names."""
    cells = points(replays, token_bytes)
    block_kib = CHUNK_TOKENS * token_bytes // 1024
    conditions = (
        f"{requests} prompts of an excerpt of the Mooncake conversation trace behind a shared prefix of "
        f"{PREFIX_TOKENS:,} tokens, dealt to tenants by conversation; groups have up to {GROUP_TENANTS} tenants; "
        f"chunks have {CHUNK_TOKENS} tokens and {block_kib} KiB. Written by `{reproduce}`; what it means is in "
        "[Benchmarks](../../docs/guides/benchmarks.md#sharing)."
    )
    return {
        "md": table(cells, conditions),
        "svg": plot(cells, "Hit rate and stored bytes by number of tenants, in four modes of sharing"),
    }

"""The result as Markdown tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from bench.benefit import break_even
from bench.benefit.arms import Arm, Cell
from bench.benefit.figures import MIB, Evaluated, Run
from bench.result import percentile

ARMS_HEAD = [
    "| arm | pods | tenants | runs | load | first token p50, p95, p99, s | p50 by run | CPU s to it, p50 "
    "| requests per CPU s | computed, % of tokens | of the least | moved, MiB | stored, MiB "
    "| from other tenants, tokens |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
]
PROPOSED = {"one pod's": "30-50 %", "fleet's": "80-95 %"}
"""Hit rates of the project's first proposal for caches of single pods and a shared one: modelled, not measured."""


def table(evaluated: Evaluated, reproduce: str) -> str:
    """Return the page that stands beside the result."""
    low, high = evaluated.load_average
    lines = [
        "# Worth of sharing, measured", "",
        f"{evaluated.runs} runs; written by `{reproduce}` and explained in "
        "[Benchmarks](../../docs/development/benchmarks-benefit.md). The machine's load average was "
        f"{low:.1f} to {high:.1f} during the main comparison: elapsed seconds are those of a shared machine, "
        "processor seconds are comparable.", "",
        "![First token and throughput by arm](benefit.light.svg)", "",
        "## Arms", "", *ARMS_HEAD,
    ]  # fmt: skip
    lines += [_row(cell, runs) for cell, runs in evaluated.by_cell.items()]
    lines += ["", "## Processor seconds of a request at saturation", "", *_parts(evaluated.by_cell)]
    lines += ["", "## Hits by number of pods and kind of conversation", "", *_hits(evaluated.by_cell)]
    if evaluated.curves:
        lines += ["", "## Break-even", "", *_break_even(evaluated.curves)]
    return "\n".join(lines) + "\n"


def _row(cell: Cell, runs: Mapping[int, Run]) -> str:
    every = list(runs.values())
    first = [second for run in every for second in run.first_s]
    cpu = [second for run in every for second in run.first_cpu_s]

    def usual(values: Iterable[float]) -> float:
        return statistics.median(values)

    p50, p95, p99 = (percentile(first, percent) for percent in (50, 95, 99))
    loads, medians = [run.load_average for run in every], [percentile(run.first_s, 50) for run in every]
    return (
        f"| {cell.arm.value} {cell.arm.label} | {cell.pods} | {cell.tenants} | {len(every)} "
        f"| {_span(loads, 1)} | {p50:.2f}, {p95:.2f}, {p99:.2f} | {_span(medians, 2)} | {percentile(cpu, 50):.2f} "
        f"| {usual(run.requests_per_cpu_s for run in every):.3f} "
        f"| {100 * usual(run.computed_tokens / run.prompt_tokens for run in every):.0f} "
        f"| {usual(run.computed_tokens / run.least_tokens for run in every):.2f} "
        f"| {usual(run.moved_bytes for run in every) / MIB:,.0f} "
        f"| {usual(run.stored_bytes for run in every) / MIB:,.0f} "
        f"| {max(run.shared_tokens for run in every):,} |"
    )


def _span(values: Sequence[float], decimals: int) -> str:
    """Return the lowest and the highest value."""
    low, high = (f"{value:.{decimals}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _parts(by_cell: Mapping[Cell, Mapping[int, Run]]) -> list[str]:
    parts = list(next(iter(next(iter(by_cell.values())).values())).cpu_s)
    lines = [f"| arm | pods | tenants | {' | '.join(parts)} | all |", "|---|--:|--:|" + "--:|" * (len(parts) + 1)]
    for cell, runs in by_cell.items():
        each = [statistics.median(run.cpu_s[part] for run in runs.values()) for part in parts]
        shown = " | ".join(f"{seconds:.3f}" for seconds in each)
        lines.append(
            f"| {cell.arm.value} {cell.arm.label} | {cell.pods} | {cell.tenants} | {shown} | {sum(each):.3f} |"
        )
    return lines


def _hits(by_cell: Mapping[Cell, Mapping[int, Run]]) -> list[str]:
    lines = ["| arm | pods | tenants | all | chat | agent | rag | at best, all |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for cell, runs in by_cell.items():
        if cell.arm not in (Arm.PREFIX_CACHE, Arm.SALTED, Arm.ISOLATED, Arm.POOL):
            continue
        every = list(runs.values())
        kinds = [statistics.median(run.hit_rates.get(kind, 0.0) for run in every) for kind in ("chat", "agent", "rag")]
        lines.append(
            f"| {cell.arm.value} {cell.arm.label} | {cell.pods} | {cell.tenants} "
            f"| {statistics.median(run.hit_rate for run in every):.0%} "
            f"| {' | '.join(f'{rate:.0%}' for rate in kinds)} "
            f"| {statistics.median(1 - run.least_tokens / run.prompt_tokens for run in every):.0%} |"
        )
    proposed = ", ".join(f"{name} {rate}" for name, rate in PROPOSED.items())
    return [
        *lines, "",
        f"The project's first proposal modelled hit rates of replicas' own caches and of a shared one ({proposed}), "
        "and three to four times less prefill. The last column is the rate of an unlimited cache without races in "
        "these conversations: no cache gets beyond it. So these conversations of isolated tenants reach neither: a "
        "tenant begins with a text that none of its own requests had. Of the kinds, only chats reach a fleet's rate, "
        "and so do all requests with a common prompt that tenants share (b and f), with about three times less "
        "prefill; documents that are read once or twice do not come near it.",
    ]  # fmt: skip


def _pays_from(tokens: float | None, shortest: int) -> str:
    if tokens is None:
        return "never"
    return f"{tokens:.0f}" if tokens > shortest else f"at most {shortest}, the shortest measured"


def _break_even(curves: Mapping[str, break_even.Curve]) -> list[str]:
    computed = curves[break_even.COMPUTED]
    lines = [
        "Measured here:", "",
        "| tier | restoring pays from, tokens (elapsed, CPU) | fixed cost, s "
        "| restores at, MB/s | has to reach, MB/s |",
        "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for source, curve in curves.items():
        if source == break_even.COMPUTED:
            continue
        fixed_s, _ = break_even.line(curve.tokens, curve.wall_s)
        pays = [
            break_even.break_even_tokens(one, other, computed.tokens)
            for one, other in ((computed.wall_s, curve.wall_s), (computed.cpu_s, curve.cpu_s))
        ]
        needed = break_even.break_even_bandwidth(computed.tokens[-1], computed.wall_s[-1], fixed_s)
        lines.append(
            f"| {source} | {', '.join(_pays_from(one, computed.tokens[0]) for one in pays)} | {fixed_s:.3f} "
            f"| {break_even.bandwidth(curve) / 1e6:.0f} | {'-' if needed is None else f'{needed / 1e6:.1f}'} |"
        )
    lines += [
        "", f"Derived, not measured (W* = B F u / 2 P, u = {break_even.UTILISATION}):", "",
        "| model and machine | KV bytes a token | restoring pays above, GB/s |", "|---|--:|--:|",
    ]  # fmt: skip
    lines += [
        f"| {one.name} | {one.token_bytes:,} | {break_even.derived_bandwidth(one) / 1e9:.1f} |"
        for one in break_even.ACCELERATORS
    ]
    return lines

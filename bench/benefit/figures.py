"""Figures of the records: by cell, required ratios, break-even, and the content of plots and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.benefit import break_even
from bench.benefit.arms import Arm, Cell, Settings, cells
from bench.benefit.optimum import allowed, least
from bench.benefit.plan import JUDGED_REPEATS, Record, best, is_quiet, of_cell, of_tiers
from bench.benefit.workload import Family, Kind, Phase, Workload, workload
from bench.result import Figure, percentile

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run's figures."""

    code: str
    """Digest of the code that it measured."""

    first_s: tuple[float, ...]
    """To the first token, of openings and paced requests, elapsed."""

    first_cpu_s: tuple[float, ...]
    """The same in processor seconds of all parts."""

    opening_s: tuple[float, ...]
    opening_cpu_s: tuple[float, ...]
    requests_per_cpu_s: float
    requests_per_s: float
    cpu_s: Mapping[str, float]
    """Processor seconds of a request at saturation, by part."""

    prompt_tokens: int
    computed_tokens: int
    least_tokens: int
    hit_rate: float
    hit_rates: Mapping[str, float]
    """By kind of conversation."""

    foreign_tokens: int
    """Tokens that tenants were served out of others' blocks, beyond the sharing that the arm intends."""

    shared_tokens: int
    """Tokens that tenants were served out of others' blocks at all."""

    moved_bytes: int
    stored_bytes: int
    quiet: bool
    load_average: float
    others_percent: float


def run_of(record: Record, drawn: Workload, cell: Cell, settings: Settings) -> Run:
    """Return the figures of one run, whose requests are `drawn`."""
    rows, phases = rows_by_number(record), record["phases"]
    requests = drawn.all
    tokens = sum(request.tokens for request in requests)
    alone = [rows[one.number] for one in (*drawn.opening, *drawn.paced)]
    opening = [rows[one.number] for one in drawn.opening]
    full_cpu_s = phases[Phase.FULL]["cpu_s"]
    hits: dict[str, list[int]] = {}
    for request in requests:
        found = hits.setdefault(request.kind, [0, 0])
        found[0] += rows[request.number]["cached"]
        found[1] += request.tokens
    return Run(
        code=record["code"],
        first_s=tuple(row["first_s"] for row in alone),
        first_cpu_s=tuple(row["first_cpu_s"] for row in alone),
        opening_s=tuple(row["first_s"] for row in opening),
        opening_cpu_s=tuple(row["first_cpu_s"] for row in opening),
        requests_per_cpu_s=len(drawn.saturating) / sum(full_cpu_s.values()),
        requests_per_s=len(drawn.saturating) / phases[Phase.FULL]["wall_s"],
        cpu_s={part: seconds / len(drawn.saturating) for part, seconds in full_cpu_s.items()},
        prompt_tokens=tokens,
        computed_tokens=sum(phase["computed"] for phase in phases.values()),
        least_tokens=least(requests, cell.arm, settings.chunk_tokens).computed_tokens,
        hit_rate=sum(row["cached"] for row in rows.values()) / tokens,
        hit_rates={kind: found / asked for kind, (found, asked) in hits.items()},
        foreign_tokens=_beyond(record, drawn, cell.arm, cell.arm),
        shared_tokens=_beyond(record, drawn, cell.arm, Arm.ISOLATED),
        moved_bytes=record["redis"]["in"] + record["redis"]["out"],
        stored_bytes=record["redis"]["used"] + record["memory_bytes"],
        quiet=is_quiet(record),
        load_average=record["load_average"],
        others_percent=record["others_percent"],
    )


def rows_by_number(record: Record) -> dict[int, Mapping[str, Any]]:
    """Return a run's rows by the number of their request."""
    return {row["number"]: row for row in record["requests"]}


def _beyond(record: Record, drawn: Workload, arm: Arm, scope_of: Arm) -> int:
    """Return how many tokens were found that no request sent before, of a scope as in `scope_of`, explains."""
    rows = rows_by_number(record)
    found = 0
    for request in drawn.all:
        row = rows[request.number]
        ended_s = row["sent_s"] + row["whole_s"]
        others = [
            one for one in drawn.all if one.number != request.number and rows[one.number]["sent_s"] < ended_s
        ]  # fmt: skip
        found += max(0, row["cached"] - allowed(request, others, arm, scope_of))
    return found


@dataclass(frozen=True, slots=True)
class Evaluated:
    """All that is shown."""

    figures: Mapping[str, Figure]
    baseline: Mapping[str, Figure]
    ratio: float
    runs: int
    others_percent: float
    load_average: Sequence[float]
    """Lowest and highest of the main comparison's runs."""

    spread: Mapping[str, Sequence[float]]
    not_measured: Mapping[str, str]
    by_cell: Mapping[Cell, Mapping[int, Run]]
    curves: Mapping[str, break_even.Curve]
    drawing: dict[str, Any]


def evaluate(settings: Settings, records: Sequence[Record], traced: Sequence[Family]) -> Evaluated:
    """Return the figures of all records. Every cell of the main comparison has a run."""
    by_cell: dict[Cell, dict[int, Run]] = {}
    skipped: dict[str, str] = {}
    for cell in cells(settings):
        for repeat, record in of_cell(records, cell).items():
            if "skipped" in record:
                skipped[_name(cell, settings)] = record["skipped"]
                continue
            drawn = workload(settings, cell.tenants, traced, f"repeat-{repeat}")
            by_cell.setdefault(cell, {})[repeat] = run_of(record, drawn, cell, settings)
    figures: dict[str, Figure] = {}
    for cell, runs in by_cell.items():
        figures |= _cell_figures(_name(cell, settings), list(runs.values()))
    main = {cell.arm: by_cell[cell] for cell in settings.main}
    ratios, spread, few = _ratios(main)
    curves = break_even.curves(row for record in of_tiers(records) for row in record["rows"])
    figures |= ratios | _tier_figures(curves)
    salted = _name(Cell(Arm.SALTED, settings.pods, settings.tenants), settings)
    ours = [name for name in figures if name.startswith(salted + "_")]
    measured = [run for runs in main.values() for run in runs.values()]
    loads = [run.load_average for run in measured]
    return Evaluated(
        figures={name: figure for name, figure in figures.items() if name not in ours},
        baseline={name: figures[name] for name in ours},
        ratio=ratios["first_token_cpu_of_salted"].value,
        runs=len(best(records)),
        others_percent=max(run.others_percent for arm in (Arm.SALTED, Arm.ISOLATED) for run in main[arm].values()),
        load_average=[min(loads), max(loads)],
        spread=spread,
        not_measured={**few, **{f"{name}_": reason for name, reason in skipped.items()}},
        by_cell=by_cell,
        curves=curves,
        drawing=_drawing(main, curves),
    )


def _name(cell: Cell, settings: Settings) -> str:
    arm = {Arm.TLS: "tls"}.get(cell.arm, cell.arm.name.lower())
    pods = f"_{cell.pods}_pods" if cell.pods != settings.pods else ""
    tenants = f"_{cell.tenants}_tenants" if cell.tenants != settings.tenants else ""
    return f"{arm}{pods}{tenants}"


def _cell_figures(name: str, runs: Sequence[Run]) -> dict[str, Figure]:
    first = [second for run in runs for second in run.first_s]
    first_cpu = [second for run in runs for second in run.first_cpu_s]
    figures = {
        f"{name}_first_token_p{percent}": Figure(percentile(first, percent), "s") for percent in (50, 95, 99)
    } | {
        f"{name}_first_token_cpu_p{percent}": Figure(percentile(first_cpu, percent), "s") for percent in (50, 95, 99)
    }  # fmt: skip

    def median(of: Callable[[Run], float]) -> float:
        return statistics.median(map(of, runs))

    figures |= {
        f"{name}_opening_p50": Figure(statistics.median(_all(runs, "opening_s")), "s"),
        f"{name}_opening_cpu_p50": Figure(statistics.median(_all(runs, "opening_cpu_s")), "s"),
        f"{name}_requests_per_cpu": Figure(median(lambda run: run.requests_per_cpu_s), "requests/s"),
        f"{name}_requests": Figure(median(lambda run: run.requests_per_s), "requests/s"),
        f"{name}_computed": Figure(median(lambda run: run.computed_tokens / run.prompt_tokens * 100), "% of tokens"),
        f"{name}_computed_of_best": Figure(median(lambda run: run.computed_tokens / run.least_tokens), "ratio"),
        f"{name}_hit_rate": Figure(median(lambda run: 100 * run.hit_rate), "%"),
        f"{name}_moved": Figure(median(lambda run: run.moved_bytes / MIB), "MiB"),
        f"{name}_stored": Figure(median(lambda run: run.stored_bytes / MIB), "MiB"),
        f"{name}_foreign_hits": Figure(max(run.foreign_tokens for run in runs), "tokens"),
        f"{name}_of_other_tenants": Figure(max(run.shared_tokens for run in runs), "tokens"),
    }
    for kind in (Kind.CHAT, Kind.AGENT, Kind.RAG):
        rates = [100 * run.hit_rates[kind] for run in runs if kind in run.hit_rates]
        figures[f"{name}_hit_rate_{kind}"] = Figure(statistics.median(rates), "%")
    for part in runs[0].cpu_s:
        figures[f"{name}_cpu_{part.replace(' ', '_')}"] = Figure(
            median(lambda run, part=part: run.cpu_s[part]), "s/request"  # type: ignore[misc]
        )  # fmt: skip
    return figures


def _all(runs: Iterable[Run], name: str) -> list[float]:
    return [value for run in runs for value in getattr(run, name)]


MainRuns = Mapping[Arm, Mapping[int, Run]]


def _ratios(main: MainRuns) -> tuple[dict[str, Figure], dict[str, list[float]], dict[str, str]]:
    """Return must-reach ratios as medians over repeats, which have the same prompts in both arms; their spread; and
    which of them have too few repeats to be judged."""
    pairs: dict[str, tuple[Arm, Arm, Callable[[Run], float], bool]] = {
        "first_token_of_salted": (Arm.ISOLATED, Arm.SALTED, lambda run: statistics.median(run.first_s), True),
        "first_token_cpu_of_salted": (
            Arm.ISOLATED, Arm.SALTED, lambda run: statistics.fmean(run.first_cpu_s), False,
        ),
        "requests_per_cpu_of_salted": (Arm.ISOLATED, Arm.SALTED, lambda run: run.requests_per_cpu_s, False),
        "requests_of_salted": (Arm.ISOLATED, Arm.SALTED, lambda run: run.requests_per_s, True),
        "tls_first_token_cpu_of_salted": (Arm.TLS, Arm.SALTED, lambda run: statistics.fmean(run.first_cpu_s), False),
        "tls_requests_per_cpu_of_salted": (Arm.TLS, Arm.SALTED, lambda run: run.requests_per_cpu_s, False),
    }  # fmt: skip
    figures, spread, few = {}, {}, {}
    for name, (one, other, value, elapsed) in pairs.items():
        both = [(main[one][repeat], main[other][repeat]) for repeat in main[one].keys() & main[other].keys()]
        both = [(mine, its) for mine, its in both if mine.code == its.code]
        # An elapsed time of a busy machine is shown only where there is no other.
        quiet = [pair for pair in both if all(run.quiet for run in pair)]
        used = quiet if elapsed and len(quiet) >= JUDGED_REPEATS else both
        ratios = [value(mine) / value(its) for mine, its in used]
        figures[name] = Figure(statistics.median(ratios), "ratio")
        spread[name] = [round(min(ratios), 3), round(max(ratios), 3)]
        if len(ratios) < JUDGED_REPEATS:
            few[name] = f"{len(ratios)} repeats, {JUDGED_REPEATS} are judged"
        elif elapsed and len(quiet) < JUDGED_REPEATS:
            few[name] = f"the machine was busy: {len(quiet)} quiet repeats of {len(both)}"
    pool, isolated = list(main[Arm.POOL].values()), list(main[Arm.ISOLATED].values())
    # The slowest tenant's first request, against the usual one of isolated tenants.
    for name, field in (("pool_opening_of_isolated", "opening_s"), ("pool_opening_cpu_of_isolated", "opening_cpu_s")):
        figures[name] = Figure(max(_all(pool, field)) / statistics.median(_all(isolated, field)), "ratio")
    if not all(run.quiet for run in (*pool, *isolated)):
        few["pool_opening_of_isolated"] = "the machine was busy during some repeats"
    figures["pool_computed_of_best_max"] = Figure(
        max(run.computed_tokens / run.least_tokens for run in pool), "ratio"
    )  # fmt: skip
    kept = (Arm.SALTED, Arm.ISOLATED, Arm.POOL, Arm.GROUP, Arm.TLS)
    foreign = max(run.foreign_tokens for arm in kept for run in main[arm].values())
    figures["foreign_hits"] = Figure(foreign, "tokens")
    return figures, spread, few


def _tier_figures(curves: Mapping[str, break_even.Curve]) -> dict[str, Figure]:
    computed = curves.get(break_even.COMPUTED)
    figures: dict[str, Figure] = {}
    if computed is None:
        return figures
    for source, curve in curves.items():
        for number, tokens in enumerate(curve.tokens):
            figures[f"{source}_{tokens}_tokens"] = Figure(curve.wall_s[number], "s")
            figures[f"{source}_{tokens}_tokens_cpu"] = Figure(curve.cpu_s[number], "s")
        if source == break_even.COMPUTED:
            continue
        for ending, computing, restoring in (
            ("", computed.wall_s, curve.wall_s), ("_cpu", computed.cpu_s, curve.cpu_s)
        ):  # fmt: skip
            tokens_at = break_even.break_even_tokens(computing, restoring, computed.tokens)
            if tokens_at is not None:
                figures[f"{source}_break_even{ending}"] = Figure(tokens_at, "tokens")
        longest = computed.tokens[-1]
        fixed_s, _ = break_even.line(curve.tokens, curve.wall_s)
        needed = break_even.break_even_bandwidth(longest, computed.wall_s[-1], fixed_s)
        figures[f"{source}_bandwidth"] = Figure(min(break_even.bandwidth(curve), 1e12) / 1e6, "MB/s")
        if needed is not None:
            figures[f"{source}_break_even_bandwidth"] = Figure(needed / 1e6, "MB/s")
    return figures


def _drawing(main: MainRuns, curves: Mapping[str, break_even.Curve]) -> dict[str, Any]:
    """Return the input of `picture`."""
    arms = []
    for arm, runs in main.items():
        every = list(runs.values())
        rates = [run.requests_per_cpu_s for run in every]
        arms.append({
            "arm": arm.value, "title": arm.label, "product": arm.product,
            "first_p50": percentile(_all(every, "first_s"), 50), "first_p95": percentile(_all(every, "first_s"), 95),
            "rate": statistics.median(rates), "rate_low": min(rates), "rate_high": max(rates),
        })  # fmt: skip
    return {
        "arms": arms,
        "curves": {name: {"tokens": list(one.tokens), "seconds": list(one.wall_s)} for name, one in curves.items()},
    }

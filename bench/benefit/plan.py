"""Choice of the next run, and the file of all records, which survives interruptions.

A record belongs to a slot: one repeat of one cell. It names its code by a digest of the settings and of the measured
code. Records of earlier code stand until their slot is measured again, and no ratio compares runs of two codes. The
file is checked in, so that a call on any machine continues where the last one ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.benefit.arms import SMOKE, WALL_JUDGED, Cell, Settings
from bench.environment import ROOT
from bench.result import QUIET_PERCENT

RUNS = ROOT / "bench/results/benefit.jsonl"
SMOKE_RUNS = ROOT / ".local/benefit-smoke.jsonl"
MEASURED_CODE = (
    "bench/benefit",
    "e2e/engine",
    "sidecar/src",
    "operator/src/kvstrata/contract",
    "requirements/engine-cpu.txt",
)
"""Code that a record depends on. The drawing and judging of figures is not part of it."""

SHOWN_ONLY = (
    "figures.py", "break_even.py", "optimum.py", "picture.py", "compare.py", "plan.py", "table.py", "__init__.py",
)  # fmt: skip

JUDGED_REPEATS = 3
"""Fewer repeats of a ratio are shown and not judged."""

TIERS = "tiers"
"""The name of the part that measures prefill against restores from each tier."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One repeat of a cell, or of the measurement of tiers (no cell)."""

    cell: Cell | None
    repeat: int

    @property
    def name(self) -> str:
        """Its name in the file."""
        cell = self.cell
        return f"{TIERS}/{self.repeat}" if cell is None else f"{cell.arm}/{cell.pods}/{cell.tenants}/{self.repeat}"

    def __str__(self) -> str:
        return f"repeat {self.repeat + 1} of {self.cell or 'prefill and restores from each tier'}"


Record = Mapping[str, Any]


def digest(settings: Settings, root: Path = ROOT) -> str:
    """Return the digest of the settings and of the measured code."""
    found = hashlib.sha256(json.dumps(asdict(settings) | {"call_minutes": 0}, sort_keys=True).encode())
    for name in MEASURED_CODE:
        path = root / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            if not (file.parent == root / "bench/benefit" and file.name in SHOWN_ONLY):
                found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def slots(settings: Settings) -> list[Slot]:
    """Return all slots in the order in which they are measured.

    Repeats of the main comparison come first, each with its arms in random order, so that none of them has better times
    of the day, but arms whose ratios are judged one after another: a machine's speed drifts by some percent in an hour.
    Each of the first ones is followed by the tiers, and all by the other cells. But these come before the rest: every
    arm and the tiers once, repeats of judged arms for a judgement, as many of the other arms, every other cell once.
    """
    found: list[Slot] = []
    for cells, repeats, tiers in (
        (settings.main, settings.repeats, settings.other_repeats),
        (settings.others, settings.other_repeats, 0),
    ):
        for repeat in range(repeats):
            found += [Slot(cell, repeat) for cell in _drawn(cells, Random(f"order/{repeat}"))]
            if repeat < tiers:
                found.append(Slot(None, repeat))

    def turn(slot: Slot) -> int:
        is_main, is_first = slot.cell in settings.main, slot.repeat == 0
        if is_main and slot.repeat < JUDGED_REPEATS:
            return 0 if is_first or _is_judged(slot.cell) else 1
        if slot.cell is None and is_first:
            return 0
        return 2 if is_first else 3

    return sorted(found, key=turn)


def _is_judged(cell: Cell | None) -> bool:
    return cell is not None and cell.arm in WALL_JUDGED


def _drawn(cells: Sequence[Cell], random: Random) -> list[Cell]:
    drawn = random.sample(cells, len(cells))
    judged = [cell for cell in drawn if _is_judged(cell)]
    first = drawn.index(judged[0]) if judged else 0
    before, after = ([cell for cell in some if cell not in judged] for some in (drawn[:first], drawn[first:]))
    return [*before, *judged, *after]


def is_quiet(record: Record) -> bool:
    """Whether other programs left the machine alone during a run."""
    return bool(record["others_percent"] <= QUIET_PERCENT)


def next_slot(settings: Settings, records: Sequence[Record], call: int, code: str) -> Slot | None:
    """Return what to measure next, None if there is nothing.

    When all was measured once, runs of arms whose elapsed times are judged, and during which the machine was busy, are
    tried again, but not twice in one call and not more than `tries` times; then runs of other code than `code`.
    """
    tried: dict[str, list[Record]] = {}
    for record in records:
        tried.setdefault(record["slot"], []).append(record)
    ordered = slots(settings)
    for slot in ordered:
        if slot.name not in tried:
            return slot
    for slot in ordered:
        runs = tried[slot.name]
        again = slot.cell is None or (slot.cell in settings.main and _is_judged(slot.cell))
        late = max(run["call"] for run in runs) < call
        if again and late and len(runs) < settings.tries and not any(map(is_quiet, runs)):
            return slot
    earlier = {record["slot"] for record in of_earlier_code(records, code)}
    return next((slot for slot in ordered if slot.name in earlier), None)


def of_earlier_code(records: Iterable[Record], code: str) -> list[Record]:
    """Return the runs of other code than `code`."""
    return [record for record in records if record["code"] != code]


def remaining(settings: Settings, records: Sequence[Record]) -> list[Slot]:
    """Return the slots that were never measured."""
    done = {record["slot"] for record in records}
    return [slot for slot in slots(settings) if slot.name not in done]


def best(records: Iterable[Record]) -> dict[str, Record]:
    """Return for each slot the run during which the machine had least other work."""
    found: dict[str, Record] = {}
    for record in records:
        known = found.get(record["slot"])
        if known is None or record["others_percent"] < known["others_percent"]:
            found[record["slot"]] = record
    return found


def of_cell(records: Iterable[Record], cell: Cell) -> dict[int, Record]:
    """Return a cell's runs by repeat."""
    prefix = f"{cell.arm}/{cell.pods}/{cell.tenants}/"
    return {int(name.rpartition("/")[2]): one for name, one in best(records).items() if name.startswith(prefix)}


def of_tiers(records: Iterable[Record]) -> list[Record]:
    """Return the runs that measured tiers."""
    return [one for name, one in best(records).items() if name.startswith(f"{TIERS}/")]


def estimate_s(records: Sequence[Record], slot: Slot) -> float:
    """Return how long a run will take: as the same cell's, else as the slowest arm's so far, else five minutes."""
    same = [one["took_s"] for one in records if one["slot"].rpartition("/")[0] == slot.name.rpartition("/")[0]]
    known = same or [max((one["took_s"] for one in records), default=300.0)]
    return float(max(known))


class State:
    """The file of records, one JSON object a line; each is written as soon as it was measured."""

    def __init__(self, settings: Settings, path: Path | None = None) -> None:
        self.path = path or (SMOKE_RUNS if settings == SMOKE else RUNS)
        self.code = digest(settings)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.records: list[Record] = [json.loads(line) for line in lines]
        self.call = 1 + max((record["call"] for record in self.records), default=0)

    def next(self, settings: Settings) -> Slot | None:
        """Return what to measure next, None if there is nothing."""
        return next_slot(settings, self.records, self.call, self.code)

    def add(self, slot: Slot, record: dict[str, Any], took_s: float) -> None:
        """Keep a run's record in place of those of earlier code. The file is whole at every moment."""
        kept = {"slot": slot.name, "code": self.code, "call": self.call, "took_s": round(took_s, 1), **record}
        replaced = [one for one in of_earlier_code(self.records, self.code) if one["slot"] == slot.name]
        self.records = [one for one in self.records if one not in replaced] + [kept]
        written = self.path.with_suffix(".new")
        written.write_text("".join(f"{json.dumps(one, separators=(',', ':'))}\n" for one in self.records))
        written.replace(self.path)

"""Processor time of tests: a pytest plugin that counts it by file, the local cluster's, and the budget of `make test`.

Processor time differs less between machines than elapsed time does, and other programs beside a run hardly change it.
A process that outlives its parent, and that no process waits for, is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from e2e.cluster.cgroups import is_version_2
from e2e.cluster.settings import REPOSITORY, Paths

DEFAULT_RECORDS = REPOSITORY / ".local" / "log" / "tests" / "processor-time"
RECORDS = Path(os.environ.get("KVSTRATA_PROCESSOR_TIME", DEFAULT_RECORDS))
"""A file for each process of pytest: seconds by test file. Runs beside each other have folders in it."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

BUDGET_S = 1_400.0
"""Of `make test` besides set-up and `make check`, on a machine that needs LOOP_S for LOOPS rounds of a loop."""

LOOPS = 10_000_000
LOOP_S = 0.18
DEAREST = 10
CLUSTER = "the local cluster"


@dataclass(slots=True)
class Account:
    """Processor time in seconds, by test file, and of the local cluster.

    Attributes:
        slowness: how many times as long a fixed loop takes here as on the machine of the budget.
    """

    by_file: Mapping[str, float]
    cluster_s: float
    slowness: float
    by_folder: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        folders = defaultdict[str, float](float)
        for file, used_s in self.by_file.items():
            folders["/".join(file.split("/")[:2])] += used_s
        self.by_folder = folders | ({CLUSTER: self.cluster_s} if self.cluster_s else {})

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.by_folder.values())

    def lines(self) -> Iterator[str]:
        """Describe it for a person."""
        yield f"processor time: {self.total_s:.0f} s: {_dearest(self.by_folder, len(self.by_folder))}"
        yield f"dearest files: {_dearest(self.by_file, DEAREST)}"

    def over_budget(self) -> list[str]:
        """Return a sentence if this is more than the budget at this machine's speed."""
        budget_s = BUDGET_S * max(1.0, self.slowness)
        if self.total_s <= budget_s:
            return []
        return [
            f"FAILED: the tests took {self.total_s:.0f} s of processor time, and their budget is {budget_s:.0f} s; make"
            " the dearest files cheaper, or leave tests without a claim to `make test-all` (docs/development/tests.md)"
        ]


class Meter:
    """Counts the runs with these names from its creation to `read`, and the local cluster if one is `stories`."""

    def __init__(self, *runs: str) -> None:
        self._runs = runs
        for run in runs:
            shutil.rmtree(RECORDS / run, ignore_errors=True)
        self._slowness = slowness()
        self.cluster_began_s = cluster_seconds()

    def read(self) -> Account:
        """Return the time that was used since then; tests that still run are left out."""
        by_file = {file: used_s for run in self._runs for file, used_s in read(RECORDS / run).items()}
        cluster_s = cluster_seconds() - self.cluster_began_s if "stories" in self._runs else 0.0
        return Account(by_file, cluster_s, (self._slowness + slowness()) / 2)


class Recorder:
    """Adds the processor time of this process and of its children to the test file that runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_file = defaultdict[str, float](float)
        self._file = ""
        self._counted_s = tree_seconds(os.getpid())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Count when the last test of a file has ended, with the fixtures of the file."""
        result = yield
        self._file = item.nodeid.partition("::")[0]
        if nextitem is None or nextitem.path != item.path:
            self._count()
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Count the fixtures of the session, and write the record."""
        if self._file:
            self._count()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._by_file))

    def _count(self) -> None:
        now_s = tree_seconds(os.getpid())
        self._by_file[self._file] += max(0.0, now_s - self._counted_s)
        self._counted_s = now_s


def counted_as(run: str) -> dict[str, str]:
    """Return the environment of pytest's processes that a meter of this run counts."""
    return {"KVSTRATA_PROCESSOR_TIME": str(RECORDS / run)}


def pytest_configure(config: pytest.Config) -> None:
    """Record in every process that runs tests."""
    config.pluginmanager.register(Recorder(RECORDS / f"{os.getpid()}.json"))


def read(records: Path) -> dict[str, float]:
    """Return the seconds by test file that all processes of a run recorded."""
    found = defaultdict[str, float](float)
    for path in records.glob("*.json"):
        for file, used_s in json.loads(path.read_text()).items():
            found[file] += used_s
    return found


def tree_seconds(root: int) -> float:
    """Return the processor time of a process, of the children that it waited for, and of all that descend from it."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for pid, parent, used in _processes():
        parents[pid], ticks[pid] = parent, used
    return sum(used for pid, used in ticks.items() if _descends(pid, root, parents)) / TICKS_PER_S


def cluster_seconds(paths: Paths | None = None) -> float:
    """Return the processor time of the local cluster since it is up, with its pods; 0 when there is none."""
    try:
        groups = ((paths or Paths()).node / "cgroups").read_text().split()
    except OSError:
        return 0.0
    for group in map(Path, groups):
        if (usage := group / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        if is_version_2() and (usage := group.parent / "cpu.stat").exists():
            return int(usage.read_text().split()[1]) / 1e6
    return 0.0


def slowness() -> float:
    """Return how many times as long a fixed loop takes here as on the machine of the budget."""

    def loop_s() -> float:
        began_s, total = time.process_time(), 0
        for number in range(LOOPS):
            total += number
        return time.process_time() - began_s

    return min(loop_s() for _ in range(3)) / LOOP_S


def _processes() -> Iterator[tuple[int, int, int]]:
    for folder in os.listdir("/proc"):
        if not folder.isdecimal():
            continue
        try:
            fields = Path(f"/proc/{folder}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(folder), int(fields[1]), sum(int(used) for used in fields[11:15])


def _descends(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def _dearest(seconds: Mapping[str, float], most: int) -> str:
    first = sorted(seconds.items(), key=lambda one: -one[1])[:most]
    return ", ".join(f"{name} {used_s:.0f}" for name, used_s in first)

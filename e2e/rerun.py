"""Tests that failed, five times more beside a load like the one they failed under.

A test that fails again has failed. One that passes five times is unsteady: a defect of a test or a race of the product.
It fails the run as well, unless `unsteady.toml` excuses it. A run that ended in any other way, or in which many tests
failed, is judged without a rerun.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path

MOST_TESTS = 5
"""More failures are no accident."""

RUNS = 5
TESTS_FAILED = 1
"""pytest's exit code when it ran to its end and some tests failed."""

UNSTEADY = Path(__file__).with_name("unsteady.toml")
EXCUSED_FOR = timedelta(days=60)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of pytest ended: its exit code, and the ids of tests that failed, with the beginnings of messages."""

    code: int
    failed: tuple[str, ...]
    messages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Excuse:
    """Why a test may be unsteady, and since when that has been known."""

    reason: str
    since: date

    def holds(self, today: date) -> bool:
        """Whether it is not too old."""
        return today <= self.since + EXCUSED_FOR


def excuses(path: Path = UNSTEADY) -> dict[str, Excuse]:
    """Return the checked-in list, by test ids."""
    return {test: Excuse(row["reason"], row["date"]) for test, row in tomllib.loads(path.read_text()).items()}


def judge(
    first: Outcome, again: Callable[[Sequence[str]], Outcome], excused: Mapping[str, Excuse], today: date
) -> tuple[list[str], list[str]]:
    """Judge a run; `again` reruns tests. Returns its failures and the excused tests, a sentence each."""
    if first.code == 0:
        return [], []
    if first.code != TESTS_FAILED or not 0 < len(first.failed) <= MOST_TESTS:
        return [f"FAILED: the tests: exit {first.code}, {len(first.failed)} failed"], []
    failures: list[str] = []
    left = list(first.failed)
    for number in range(1, RUNS + 1):
        found = again(left) if left else Outcome(0, ())
        if found.code not in (0, TESTS_FAILED) or (found.code and not found.failed):
            failures += [f"FAILED: {test}: in its rerun, pytest ended with {found.code}" for test in left]
            left = []
        failures += [
            f"FAILED: {test}: failed again in rerun {number} of {RUNS}{_quoted(first, test)}"
            for test in left
            if test in found.failed
        ]
        left = [test for test in left if test not in found.failed]
    allowed: list[str] = []
    for test in left:
        excuse = excused.get(test)
        if excuse is not None and excuse.holds(today):
            allowed.append(f"UNSTEADY: {test}: excused since {excuse.since}: {excuse.reason}{_quoted(first, test)}")
        else:
            failures.append(
                f"UNSTEADY: {test}: failed once, and passed {RUNS} reruns under load; find the cause"
                f"{_quoted(first, test)}"
            )
    return failures, allowed


def _quoted(first: Outcome, test: str) -> str:
    message = first.messages.get(test)
    return f" (at first: {message})" if message else ""

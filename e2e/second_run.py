"""What failed beside others, once more by itself.

Hundreds of tests wait for real servers while others compute on the same processors. Whether a failure is the code's or
the company's is found out by running the failed tests again when nothing else runs. What fails again has failed. What
passes then is unsteady: a defect of a test or a race of the product, which is told by name at the very end, to be
mended. A suite that ended in any other way, or in which many failed, is not run again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.lanes import Command, Failure

AT_MOST = 5
"""Failed tests of one suite: more are no accident."""

NO_SKIPS = ("-p", "e2e.no_skips")

TESTS_FAILED = 1
"""pytest's exit code when it ran to its end and some failed."""


@dataclass(frozen=True, slots=True)
class Suites:
    """Commands that run pytest and remember which tests failed; `memory` is a folder for that."""

    memory: Path

    def suite(self, name: str, *arguments: str) -> Command:
        """A suite's first run."""
        return Command(name, (*pytest(), f"-ocache_dir={self._memory(name)}", "--cache-clear", *arguments))

    def failed(self, name: str) -> list[str]:
        """Which tests of a suite failed in its last run."""
        found = self._memory(name) / "v" / "cache" / "lastfailed"
        return sorted(json.loads(found.read_text())) if found.exists() else []

    def judge(
        self, failures: Sequence[Failure], run: Callable[[Command], Sequence[Failure]]
    ) -> tuple[list[str], list[str]]:
        """Run what failed again by `run`; return what has failed, a sentence each, and the names of unsteady tests."""
        failed: list[str] = []
        unsteady: list[str] = []
        for failure in failures:
            names = self.failed(failure.command.name)
            if failure.code == TESTS_FAILED and 0 < len(names) <= AT_MOST and not run(_once_more(failure.command)):
                unsteady += names
            else:
                failed.append(str(failure))
        return failed, unsteady

    def _memory(self, name: str) -> Path:
        return self.memory / name.replace("/", "-").replace(" ", "-")


def _once_more(first: Command) -> Command:
    arguments = tuple("--last-failed" if argument == "--cache-clear" else argument for argument in first.arguments)
    # A test that is skipped now has not passed.
    arguments += NO_SKIPS
    return Command(f"{first.name}, once more what failed", arguments, first.environment)


def pytest() -> tuple[str, ...]:
    """Return how pytest is called here, without what it is to run."""
    strict = (*NO_SKIPS, "-p", "e2e.same_examples") if os.environ.get("KVSTRATA_NO_SKIPS") else ()
    return (sys.executable, "-m", "pytest", *strict, "--durations=25")

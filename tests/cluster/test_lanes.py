"""Lanes: side by side, each command's output in one piece, and no failure lost."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

from e2e.cluster.progress import Progress
from e2e.lanes import Command, Lanes


def program(name: str, text: str) -> Command:
    return Command(name, (sys.executable, "-c", text))


def lanes(tmp_path: Path, printed: list[str]) -> Lanes:
    return Lanes(tmp_path / "logs", Progress(io.StringIO()), printed.append)


def test_lanes_run_beside_each_other_and_the_commands_of_one_in_order(tmp_path: Path) -> None:
    met = tmp_path / "met"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(met)!r}).exists(): time.sleep(0.01)"
    meets = f"import pathlib; pathlib.Path({str(met)!r}).touch()"
    sees = f"import pathlib, sys; sys.exit(not pathlib.Path({str(met)!r}).exists())"
    printed: list[str] = []
    assert (
        lanes(tmp_path, printed).run([[program("waits", waits), program("sees", sees)], [program("meets", meets)]])
        == []
    )


def test_a_failure_is_told_and_stops_nothing(tmp_path: Path) -> None:
    printed: list[str] = []
    failures = lanes(tmp_path, printed).run(
        [
            [program("one", "print('why'); raise SystemExit(3)"), program("two", "print('goes on')")],
            [program("three", "")],
        ]
    )
    assert [str(failure) for failure in failures] == ["FAILED: one: exit 3"]
    assert any("one:\nwhy" in text for text in printed)
    assert any("goes on" in text for text in printed)


def test_the_output_of_a_command_is_printed_in_one_piece_and_kept(tmp_path: Path) -> None:
    printed: list[str] = []
    lanes(tmp_path, printed).run([[program("a/b c", "import sys; print('out'); print('err', file=sys.stderr)")]])
    whole = next(text for text in printed if text.startswith("a/b c:\n"))
    assert "out" in whole
    assert "err" in whole
    assert "out" in (tmp_path / "logs" / "a-b-c.log").read_text()


def test_what_needs_a_command_that_failed_is_not_run_and_told(tmp_path: Path) -> None:
    printed: list[str] = []
    needed = replace(program("the first", "raise SystemExit(3)"), is_needed=True)
    failures = lanes(tmp_path, printed).run([[needed, program("the second", "print('runs')")], [program("other", "")]])
    assert [str(failure) for failure in failures] == [
        "FAILED: the first: exit 3",
        "NOT RUN: the second, because this failed: the first",
    ]
    assert not any("runs" in text for text in printed)


def test_a_command_stands_back_as_far_as_it_is_to(tmp_path: Path) -> None:
    printed: list[str] = []
    tells = program("tells", "import os; print('nice', os.nice(0))")
    lanes(tmp_path, printed).run([[tells, replace(tells, name="stands back", niceness=3)]])
    own = os.nice(0)
    assert f"tells:\nnice {own}" in printed
    assert f"stands back:\nnice {min(own + 3, 19)}" in printed


def test_meanwhile_the_progress_tells_what_runs_and_how_far_it_is(tmp_path: Path) -> None:
    stream = io.StringIO()
    tests = "import time; print('test_it.py ... [ 25%]', flush=True); time.sleep(2.5)"
    Lanes(tmp_path / "logs", Progress(stream), [].append).run([[program("tests", tests)], [program("ends", "")]])
    assert "tests 25 % ... 2 s" in stream.getvalue()

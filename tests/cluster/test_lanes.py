"""Lanes: side by side, each command's output in one piece, and no failure lost."""

from __future__ import annotations

import io
import sys
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

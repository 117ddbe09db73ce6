"""What is remembered from one snapshot to the next is never older than its inputs."""

from __future__ import annotations

from kvstrata.model.memo import Memo


def test_the_same_inputs_are_computed_once() -> None:
    memo, calls = Memo(), []

    def compute() -> str:
        calls.append(1)
        return "result"

    inputs = (object(), "x")
    assert [memo.get("result", "name", inputs, compute) for _ in range(3)] == ["result"] * 3
    assert len(calls) == 1


def test_other_inputs_are_computed_anew_and_take_the_place_of_the_old() -> None:
    memo = Memo()
    assert memo.get("result", "name", (1,), lambda: "one") == "one"
    assert memo.get("result", "name", (2,), lambda: "two") == "two"
    assert memo.get("result", "name", (1,), lambda: "one again") == "one again"
    assert len(memo) == 1


def test_an_answer_of_nothing_is_an_answer() -> None:
    memo = Memo()
    assert memo.get("result", "name", (1,), lambda: None) is None
    assert memo.get("result", "name", (1,), lambda: "never asked") is None


def test_what_is_forgotten_is_computed_anew() -> None:
    memo = Memo()
    for what in ("result", "other result"):
        memo.get(what, "name", (1,), lambda: "old")
    memo.get("result", "other", (1,), lambda: "old")
    memo.forget("name")
    memo.forget("never known")
    assert len(memo) == 1
    assert memo.get("result", "name", (1,), lambda: "new") == "new"
    assert memo.get("result", "other", (1,), lambda: "new") == "old"

"""The task table: each task is answered once, and never while a part touches a buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.tier.tasks import Gain, StoreOutcome, Task, TaskKind, TaskTable


class Recorder(list[Task]):
    def __call__(self, task: Task) -> None:
        self.append(task)


def table() -> tuple[TaskTable, Recorder]:
    answered = Recorder()
    return TaskTable(answered), answered


def test_a_task_without_parts_is_answered_at_once() -> None:
    tasks, answered = table()
    task = tasks.open(TaskKind.LOAD, 3, 0, deadline_s=1)
    assert answered == [task]
    assert tasks.pop_found(task.task_id) == bytes(3)


def test_a_lookup_is_answered_with_its_last_part_and_fetched_once() -> None:
    tasks, answered = table()
    task = tasks.open(TaskKind.LOOKUP, 4, 2, deadline_s=1)
    for hits in ((0,), (2, 3)):
        assert tasks.pop_found(task.task_id) is None
        assert tasks.begin(task)
        tasks.end(task, Gain(list(hits)))
    assert answered == [task]
    assert tasks.pop_found(task.task_id) == bytes([1, 0, 1, 1])
    assert tasks.pop_found(task.task_id) is None


def test_a_load_past_its_deadline_is_not_answered_while_a_part_touches_its_buffer() -> None:
    tasks, answered = table()
    task = tasks.open(TaskKind.LOAD, 2, 2, deadline_s=1)
    assert tasks.begin(task)
    assert tasks.expire(2) == [task]
    assert not answered
    assert not tasks.begin(task), "no further part may begin"
    tasks.end(task, Gain([1]))
    assert answered == [task]
    assert tasks.pop_found(task.task_id) == bytes([0, 1])


def test_a_load_past_its_deadline_that_touches_nothing_is_answered_at_once() -> None:
    tasks, answered = table()
    task = tasks.open(TaskKind.LOAD, 2, 2, deadline_s=1)
    assert tasks.begin(task)
    tasks.end(task, Gain(), over=False)
    assert tasks.expire(1) == [task]
    assert answered == [task]
    assert not tasks._tasks


def test_a_lookup_past_its_deadline_is_answered_at_once_and_its_late_hits_are_forgotten() -> None:
    tasks, answered = table()
    task = tasks.open(TaskKind.LOOKUP, 2, 2, deadline_s=1)
    assert tasks.begin(task)
    tasks.end(task, Gain([0]))
    assert tasks.begin(task)
    tasks.expire(1)
    assert answered == [task]
    assert tasks.pop_found(task.task_id) == bytes([1, 0])
    tasks.end(task, Gain([1]))
    assert tasks.pop_found(task.task_id) is None
    assert answered == [task]


def test_a_store_reports_the_bytes_that_were_stored_and_fails_only_if_there_were_none() -> None:
    tasks, _ = table()
    partly = tasks.open(TaskKind.STORE, 2, 2, deadline_s=1)
    assert tasks.begin(partly)
    tasks.end(partly, Gain([], ["a"], [10]))
    tasks.drop(partly)
    lost = tasks.open(TaskKind.STORE, 1, 1, deadline_s=1)
    tasks.drop(lost)
    refused = tasks.open(TaskKind.STORE, 1, 0, deadline_s=1)
    assert tasks.pop_stores() == {
        partly.task_id: StoreOutcome(True, 10),
        lost.task_id: StoreOutcome(False, 0),
        refused.task_id: StoreOutcome(True, 0),
    }
    assert tasks.pop_stores() == {}


def test_the_next_deadline_is_the_earliest_of_those_not_cancelled() -> None:
    tasks, _ = table()
    assert tasks.next_deadline_s() is None
    first = tasks.open(TaskKind.LOAD, 1, 1, deadline_s=1)
    tasks.open(TaskKind.LOAD, 1, 1, deadline_s=5)
    assert tasks.next_deadline_s() == 1
    assert tasks.begin(first)
    tasks.expire(1)
    assert tasks.next_deadline_s() == 5


@given(
    kind=st.sampled_from(TaskKind),
    parts=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["begin", "end", "pause", "drop", "expire"]), max_size=30),
)
def test_whatever_happens_a_task_is_answered_once_and_never_while_touched(
    kind: TaskKind, parts: int, steps: list[str]
) -> None:
    tasks, answered = table()
    task = tasks.open(kind, parts, parts, deadline_s=10)
    waiting, touching = parts, 0
    for step in steps:
        before = len(answered)
        if step == "begin" and waiting and tasks.begin(task):
            waiting, touching = waiting - 1, touching + 1
        elif step in ("end", "pause") and touching:
            touching -= 1
            waiting += step == "pause"
            tasks.end(task, Gain(), over=step == "end")
        elif step == "drop" and waiting:
            waiting -= 1
            tasks.drop(task)
        elif step == "expire":
            tasks.expire(10)
        if len(answered) > before:
            assert touching == 0 or kind is TaskKind.LOOKUP
    while touching:
        touching -= 1
        tasks.end(task, Gain())
    while waiting:
        waiting -= 1
        tasks.drop(task)
    assert answered == [task]
    assert not tasks._tasks

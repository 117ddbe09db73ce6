"""How much a deletion deletes at once, by how long a server takes for it."""

from __future__ import annotations

from kvstrata_sidecar.delete_job.run import BYTES_AT_ONCE, COMMANDS_SEEN, GOAL_S, LEAST_AT_ONCE, MOST_AT_ONCE, Pace


def test_steps_grow_while_they_are_short_and_shrink_when_they_are_not() -> None:
    pace = Pace()
    for _ in range(10):
        pace.took(pace.count(1), GOAL_S / 10)
    assert pace.count(1) == MOST_AT_ONCE
    for _ in range(5 * COMMANDS_SEEN):
        pace.took(pace.count(1), GOAL_S * 2)
    assert pace.count(1) == LEAST_AT_ONCE


def test_steps_fit_what_a_value_takes() -> None:
    pace = Pace()
    for _ in range(20):
        count = pace.count(1)
        pace.took(count, count * GOAL_S / 100)
    assert pace.count(1) == 100


def test_what_most_commands_wait_for_a_processor_makes_steps_no_smaller_and_pauses_no_longer() -> None:
    pace = Pace()
    pauses = []
    for number in range(10 * COMMANDS_SEEN):
        count = pace.count(1)
        waited_s = 0.0 if number % COMMANDS_SEEN == 0 else 0.1
        pauses.append(pace.took(count, count * GOAL_S / 100 + waited_s))
    assert pace.count(1) == 100
    assert max(pauses) <= 1.01 * GOAL_S


def test_a_server_that_became_slower_is_believed_after_a_few_commands() -> None:
    pace = Pace()
    for slow in (1, 10):
        for _ in range(COMMANDS_SEEN + 10):
            count = pace.count(1)
            pace.took(count, slow * count * GOAL_S / 100)
    assert pace.count(1) == 10


def test_of_large_values_few_go_at_once_but_one_always_does() -> None:
    assert Pace().count(BYTES_AT_ONCE // 4) == 4
    assert Pace().count(10 * BYTES_AT_ONCE) == 1

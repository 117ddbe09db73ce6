"""What the benchmark of neighbours replays and how losses are told; what needs a server is in the benchmark itself."""

from __future__ import annotations

import pytest

from bench.neighbours.caches import VALUE_BYTES, ExactLru
from bench.neighbours.compare import (
    CAPACITY_PERCENT,
    GUARANTEED_PERCENT,
    budgets,
    lost_percent,
    prompts_in,
    served,
    worst_percent,
)
from bench.neighbours.workload import (
    SCAN_RATE,
    SCANNER,
    TENANTS,
    Prompt,
    distinct_blocks,
    prompts_of,
    with_scanner,
)
from bench.sharing.excerpt import TENTH
from bench.sharing.trace import CHUNK_TOKENS, requests_of


def test_the_scanner_sends_five_times_what_all_neighbours_send_and_never_a_block_twice() -> None:
    prompts = [Prompt(number % TENANTS, tuple(range(number, 2 * number)), float(number)) for number in range(20)]
    beside = list(with_scanner(prompts))
    assert [one for one in beside if one.tenant != SCANNER] == prompts
    scanned = [block for one in beside if one.tenant == SCANNER for block in one.blocks]
    assert len(scanned) == SCAN_RATE * sum(len(one.blocks) for one in prompts)
    assert len(set(scanned)) == len(scanned)


def test_a_conversation_is_wholly_one_tenants_and_its_turns_find_one_another() -> None:
    rows = [
        {"input_length": CHUNK_TOKENS * blocks, "hash_ids": [0, *range(1, blocks)]}
        for blocks in (5, 9)  # the second turn begins with the first
    ]
    first, second = prompts_of(requests_of(rows), [10.0, 12.5])
    assert first.tenant == second.tenant
    assert second.blocks[: len(first.blocks)] == first.blocks == (2, 4)
    assert (first.at_s, second.at_s) == (0.0, 2.5)
    assert distinct_blocks([first, second]) == len(second.blocks)
    assert served(ExactLru(100), [first, second])[first.tenant] == 2


def test_one_lru_lets_a_scan_take_everything() -> None:
    prompts = [Prompt(0, (1, 2, 3), 0.0)] * 2
    assert sum(served(ExactLru(10), prompts)) == 3
    assert sum(served(ExactLru(10), with_scanner(prompts))) == 0


def test_only_the_blocks_before_the_first_that_is_not_there_are_hits() -> None:
    cache = ExactLru(3)
    cache.serve(Prompt(0, (1, 2, 3, 4), 0.0))  # 1 is the oldest and went
    assert cache.serve(Prompt(0, (1, 2), 1.0)) == 0
    assert cache.serve(Prompt(0, (1, 2), 2.0)) == 2


def test_losses_are_told_of_all_and_of_the_worst_who_had_any() -> None:
    assert lost_percent([80, 20, 0], [80, 15, 0]) == pytest.approx(5)
    assert worst_percent([80, 20, 0], [80, 15, 0]) == pytest.approx(25)
    assert lost_percent([10], [11]) == pytest.approx(-10)


def test_what_policies_guarantee_and_the_scanner_may_have_fits_into_the_room() -> None:
    given = budgets(1000)
    assert set(given) == {*range(TENANTS), SCANNER}
    taken = [(one.guaranteed_bytes or 0) + (one.limit_bytes or 0) for one in given.values()]
    assert min(taken) > 0
    assert sum(taken) <= 1000 * VALUE_BYTES


def test_what_is_guaranteed_to_one_holds_the_longest_prompt() -> None:
    prompts = prompts_in(TENTH)
    capacity = distinct_blocks(prompts) * CAPACITY_PERCENT // 100
    assert capacity * GUARANTEED_PERCENT // 100 >= max(len(one.blocks) for one in prompts)

"""Blocks that slower tiers have yet to copy, to the moment."""

from __future__ import annotations

from typing import Any

from kvstrata_sidecar.adapter.memory import erase, evictor
from kvstrata_sidecar.adapter.memory.write_back import GRACE_S, MAX_POOLS, PATIENCE_S, Offers, PendingWriteBack
from tests.adapter.memory_server import B

SOON = 1e-6


def test_figures_are_those_that_the_guides_name() -> None:
    assert GRACE_S == 0.25
    assert (evictor.GATHER_S, erase.WITHIN_S) == (0.005, 2.0)


class TestBlocksOnTheirWay:
    def test_a_block_waits_a_quarter_of_a_second_for_lmcaches_own_copy(self) -> None:
        now_s = [10.0]
        pending = PendingWriteBack(lambda key: key != "none", lambda: now_s[0])
        pending.came(["x", "none"])
        now_s[0] += 0.1
        pending.came(["y"])
        pending.came(["x"])
        assert [pending.waits(key, 10.0) for key in ("x", "y", "none")] == [True, True, False]
        assert (pending.waits("x", 10.1 + GRACE_S - SOON), pending.waits("x", 10.1 + GRACE_S)) == (True, False)
        pending.taken(["y", "z"])
        assert not pending.waits("y", 10.0)
        assert pending

    def test_those_that_came_too_long_ago_are_forgotten_and_later_ones_are_not(self) -> None:
        now_s = [10.0]
        pending = PendingWriteBack(lambda _: True, lambda: now_s[0])
        for key in "xyz":
            pending.came([key])
            now_s[0] += 0.1
        pending.forget(10.0 + GRACE_S - SOON)
        assert list(pending._came_s) == ["x", "y", "z"]
        pending.forget(10.1 + GRACE_S)
        assert list(pending._came_s) == ["z"]
        pending.forget(99.0)
        assert not pending
        for moment_s, key in ((20.0, "x"), (20.1, "y"), (20.2, "x")):
            now_s[0] = moment_s
            pending.came([key])
        pending.forget(20.1 + GRACE_S)
        assert list(pending._came_s) == ["x"], "what came again is the last"


class TestOffers:
    def test_a_block_is_offered_at_the_very_end_of_its_time(self) -> None:
        now_s, offered, counts = [0.0], list[list[Any]](), list[tuple[str, int, str]]()
        offers = Offers(offered.append, lambda *count: counts.append(count), lambda: now_s[0])
        offers.lacking(B, ["x"])
        now_s[0] = PATIENCE_S - 0.5
        offers.lacking(B, ["x", "y"])
        assert offered == []
        now_s[0] = PATIENCE_S
        offers.lacking(B, ["x", "y"])
        assert (offered, counts) == ([["x"]], [("offered_again", 1, B)])
        now_s[0] = 2 * PATIENCE_S - 0.5
        offers.lacking(B, ["x", "y"])
        assert offered == [["x"], ["y"]]
        now_s[0] = 2 * PATIENCE_S
        offers.lacking(B, ["x", "y"])
        assert offered == [["x"], ["y"], ["x"]]

    def test_the_pool_asked_about_longest_ago_is_forgotten_first(self) -> None:
        now_s, offered = [0.0], list[list[Any]]()
        offers = Offers(offered.append, lambda *_: None, lambda: now_s[0])
        for number in range(MAX_POOLS):
            offers.lacking(str(number), [f"{number}"])
        offers.lacking("0", ["0"])
        offers.lacking("new", ["n"])
        now_s[0] = PATIENCE_S
        for name in ("0", "2", "new", "1"):
            offers.lacking(name, [name])
        assert offered == [["0"], ["2"]], "1 was forgotten, and the new pool's block is another"

"""What the benchmark of sharing compares with: the arithmetic optimum, the workload, the table and the plot."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.__main__ import RESULTS
from bench.sharing.excerpt import EXCERPT, excerpt
from bench.sharing.figures import Point, series, table
from bench.sharing.optimum import GROUP_TENANTS, Mode, Optimum, optimum
from bench.sharing.trace import CHUNK_TOKENS, PREFIX, PREFIX_TOKENS, Request, load, requests_of, tenants_of

PREFIX_CHUNKS = len(PREFIX)


def prompt(*own: int, tail: int = 1, conversation: int = 0) -> Request:
    """A prompt of the prefix, these chunks of its own, and some tokens of an incomplete one."""
    return Request(conversation, PREFIX + own, PREFIX_TOKENS + CHUNK_TOKENS * len(own) + tail)


class TestOptimum:
    def test_each_isolated_tenant_keeps_and_computes_the_prefix(self) -> None:
        best = optimum([prompt(1), prompt(2)], [0, 1], Mode.ISOLATED)
        tokens = 2 * (PREFIX_TOKENS + CHUNK_TOKENS + 1)
        assert best == Optimum(2 * (PREFIX_CHUNKS + 1), tokens, tokens, 0)

    def test_with_a_pool_the_prefix_is_kept_and_computed_once_for_all(self) -> None:
        best = optimum([prompt(1), prompt(2)], [0, 1], Mode.POOL)
        assert best.chunks == PREFIX_CHUNKS + 2
        assert best.hit_tokens == 2 * PREFIX_TOKENS
        assert best.prefill_tokens == PREFIX_TOKENS + 2 * (CHUNK_TOKENS + 1)

    def test_a_pool_shares_nothing_but_the_prefix_and_a_group_all(self) -> None:
        prompts, tenants = [prompt(1, 2), prompt(1, 3)], [0, GROUP_TENANTS - 1]
        assert optimum(prompts, tenants, Mode.POOL).chunks == PREFIX_CHUNKS + 4
        assert optimum(prompts, tenants, Mode.GROUP).chunks == PREFIX_CHUNKS + 3
        assert optimum(prompts, [0, GROUP_TENANTS], Mode.GROUP).chunks == 2 * (PREFIX_CHUNKS + 2)
        assert optimum(prompts, [0, GROUP_TENANTS], Mode.PUBLIC).chunks == PREFIX_CHUNKS + 3

    def test_of_a_prompt_that_is_there_as_a_whole_one_token_is_computed(self) -> None:
        whole = prompt(1, tail=0)
        assert optimum([whole, whole], [0, 0], Mode.ISOLATED).hit_tokens == whole.tokens - 1
        assert optimum([prompt(tail=0)], [0], Mode.POOL).hit_tokens == PREFIX_TOKENS - 1

    @given(
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 2)), max_size=30),
        st.sampled_from(Mode),
    )
    def test_it_is_what_a_cache_without_bounds_comes_to(self, drawn: list[tuple[int, int, int]], mode: Mode) -> None:
        # Names of a tree: a chunk's name stands for the chunks before it, as hashes of prefixes do.
        prompts = [prompt(*range(100 * root, 100 * root + depth), tail=tail) for root, depth, tail in drawn]
        tenants = [number % 17 for number in range(len(prompts))]
        assert optimum(prompts, tenants, mode) == simulated(prompts, tenants, mode)


def simulated(prompts: Sequence[Request], tenants: Sequence[int], mode: Mode) -> Optimum:
    """Serve prompts one after the other from caches that forget nothing."""
    pool = set(PREFIX) if mode is Mode.POOL else set[int]()
    caches: dict[str, set[int]] = {}
    hits = computed = 0
    for one, tenant in zip(prompts, tenants, strict=True):
        cache = caches.setdefault(mode.scope(tenant), set())
        found = 0
        for name in one.chunks:
            if name not in cache and name not in pool:
                break
            found += 1
        prefill = max(1, one.tokens - CHUNK_TOKENS * found)
        hits, computed = hits + one.tokens - prefill, computed + prefill
        cache.update(one.chunks[found:])
    chunks = len(pool) + sum(map(len, caches.values()))
    return Optimum(chunks, computed + CHUNK_TOKENS * len(pool), sum(one.tokens for one in prompts), hits)


def row(length: int, *blocks: int) -> dict[str, object]:
    return {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(blocks)}


class TestTrace:
    def test_the_prefix_stands_in_the_place_of_the_first_block(self) -> None:
        (one,) = requests_of([row(1200, 0, 5, 6)])
        assert one.chunks == (*PREFIX, 5), "the last block is incomplete"
        assert one.tokens == PREFIX_TOKENS + 1200 - CHUNK_TOKENS

    def test_a_prompt_that_begins_with_an_earlier_one_continues_its_conversation(self) -> None:
        rows = [row(1024, 0, 5), row(1536, 0, 5, 6), row(1536, 0, 5, 7), row(2048, 0, 5, 6, 8), row(100, 0)]
        assert [one.conversation for one in requests_of(rows)] == [0, 0, 0, 0, 1]

    def test_prompts_that_only_begin_alike_are_two_conversations(self) -> None:
        rows = [row(1536, 0, 5, 6), row(1536, 0, 5, 7)]
        assert [one.conversation for one in requests_of(rows)] == [0, 1]

    def test_a_row_whose_length_does_not_fit_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="1025 tokens has 2 blocks"):
            requests_of([row(1025, 0, 1)])

    def test_a_conversation_has_one_tenant_and_all_tenants_have_some(self) -> None:
        requests = load(EXCERPT)
        for tenants in (1, 2, 64):
            owners = tenants_of(requests, tenants)
            assert set(owners) == set(range(tenants))
            owner_of = {one.conversation: owner for one, owner in zip(requests, owners, strict=True)}
            assert [owner_of[one.conversation] for one in requests] == owners

    def test_in_the_excerpt_a_name_stands_for_all_that_is_before_it(self) -> None:
        requests = load(EXCERPT)
        assert len(requests) == 204
        before: dict[int, int] = {}
        for one in requests:
            for earlier, name in pairwise(one.chunks):
                assert before.setdefault(name, earlier) == earlier

    def test_an_excerpt_holds_families_as_a_whole(self) -> None:
        drawn = random.Random(1)
        rows = [row(1536, 0, family, 1000 + n) for n in range(600) for family in [drawn.randrange(300)]]
        kept = excerpt(rows)
        families = {one["hash_ids"][1] for one in kept}
        assert kept
        assert kept == [one for one in rows if one["hash_ids"][1] in families]  # type: ignore[index]


def points() -> dict[tuple[Mode, int], Point]:
    return {
        (mode, tenants): Point(0.5 / tenants, 0.5, tenants << 20, tenants << 20, 1000 * tenants, 900 * tenants)
        for tenants in (1, 2, 64)
        for mode in Mode
    }


class TestPicture:
    def test_the_table_has_every_point_beside_its_optimum(self) -> None:
        lines = table(points(), 204, 16, "make bench").splitlines()
        assert "| 2 | Isolated + pool | 25.0% | 50.0% | 2.00 | 2.00 | 2,000 | 1,800 |" in lines
        assert sum(line.startswith(("| 1 ", "| 2 ", "| 64 ")) for line in lines) == 3 * len(Mode)

    def test_the_plot_is_given_the_same_for_the_same_numbers_in_any_order(self) -> None:
        lines = series(points())
        assert json.dumps(lines) == json.dumps(series(dict(reversed(points().items()))))
        assert list(lines) == list(Mode)
        assert lines[Mode.POOL] == {"tenants": [1, 2, 64], "hit_percent": [50, 25, 0.78125], "stored_mib": [1, 2, 64]}


class TestResult:
    """The plot and the table that are checked in: drawing needs what only the benchmark installs."""

    PLOT = ElementTree.parse(RESULTS / "sharing.svg").getroot()  # noqa: S314
    ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (\S+)% \| \S+ \| (\S+) \|", (RESULTS / "sharing.md").read_text(), re.M)

    @pytest.mark.parametrize(("panel", "column", "rounded"), [("hit_percent", 2, 0.05), ("stored_mib", 3, 0.005)])
    def test_each_mode_is_one_line_a_panel_with_the_values_of_the_table(
        self, panel: str, column: int, rounded: float
    ) -> None:
        _, _, width, height = map(float, self.PLOT.attrib["viewBox"].split())
        drawn = []
        for mode in Mode:
            path = self.PLOT.find(f".//*[@id='{panel}-{mode.name}']/{{*}}path")
            assert path is not None
            corners = [tuple(map(float, corner)) for corner in re.findall(r"[ML] (\S+) (\S+)", path.attrib["d"])]
            rows = [row for row in self.ROWS if row[1] == mode]
            assert len(corners) == len(rows) == 7
            assert all(0 < x < width and 0 < y < height for x, y in corners)
            drawn += [(x, y, int(row[0]), float(row[column])) for (x, y), row in zip(corners, rows, strict=True)]
        left, right, low, high = (
            find(drawn, key=itemgetter(at)) for at, find in ((2, min), (2, max), (3, min), (3, max))
        )
        for x, y, tenants, value in drawn:
            assert x == pytest.approx(
                left[0] + (right[0] - left[0]) * math.log2(tenants) / math.log2(right[2]), abs=0.1
            )
            shown = low[3] + (high[3] - low[3]) * (y - low[1]) / (high[1] - low[1])
            assert value == pytest.approx(shown, abs=2 * rounded)

    def test_titles_and_modes_can_be_read(self) -> None:
        texts = [element.text for element in self.PLOT.iterfind(".//{*}text")]
        assert {"Hit rate, % of prompt tokens", "Stored, MiB", "tenants", *Mode} <= set(texts)

    @pytest.mark.parametrize("background", [1.0, 0.006])
    def test_lines_and_text_stand_out_from_white_and_from_near_black(self, background: float) -> None:
        lines, texts = (
            set(re.findall("#[0-9a-f]{6}", " ".join(one.attrib.get("style", "") for one in self.PLOT.iterfind(of))))
            for of in (".//{*}path", ".//{*}text")
        )
        assert len(lines - texts) == len(Mode)
        for colour, least in [*((colour, 3) for colour in lines), *((colour, 4) for colour in texts)]:
            light, dark = sorted((luminance(colour), background), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, colour


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

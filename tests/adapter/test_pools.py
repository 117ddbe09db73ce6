"""What pools have and who reads it: decisions, permits on a reader's behalf, and the memory's write filter."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.cache_view import MANIFESTS_DIRECTORY, CacheView, PoolView
from kvstrata.contract.policy.pools import pack_hashes
from kvstrata.contract.wire import digest_bytes
from kvstrata_sidecar.adapter.index import Cause, ScopeIndex, Situation, choose
from kvstrata_sidecar.adapter.policy.enforcement import NANOSECONDS, Enforcement, Permit, Refusal
from kvstrata_sidecar.adapter.policy.limits import Bounds
from kvstrata_sidecar.adapter.policy.pools import MAX_CANDIDATES, Manifests, Readable
from kvstrata_sidecar.adapter.redis.exchanges import Shares
from kvstrata_sidecar.adapter.redis.recent import Recent
from tests.tiers.gate_stand_in import DOMAIN

READER, OTHER, NEW, OLD, WARMING = "a" * 32, "b" * 32, "c" * 32, "d" * 32, "e" * 32


def chunk(number: int) -> bytes:
    return bytes([number]) * 32


def manifest(*numbers: int) -> tuple[str, bytes]:
    packed = pack_hashes(chunk(number) for number in numbers)
    return digest_bytes(packed), packed


def view(
    revision: int = 1, reads: tuple[str, ...] = (NEW, OLD), readers: tuple[str, ...] = (READER, OTHER)
) -> CacheView:
    pools = {
        NEW: PoolView(manifest(1, 2)[0], True, ("shared",)),
        OLD: PoolView(manifest(2, 3)[0], True, ("shared", "slow")),
        WARMING: PoolView(manifest(4)[0], False, ("shared",)),
    }
    keyspaces = dict.fromkeys((*readers, *pools), ())
    granted = {READER: reads} if reads and READER in readers else {}
    return CacheView(DOMAIN, revision, 1, Rules(on_stale="ServeStale"), keyspaces, {}, pools, granted)


FILES = {digest: frozenset(packed[n : n + 32] for n in range(0, len(packed), 32))
         for digest, packed in (manifest(1, 2), manifest(2, 3), manifest(4))}  # fmt: skip
READABLE = Readable.of(view(), FILES)


@pytest.mark.parametrize(
    ("number", "tier", "pools"),
    [
        (1, None, (NEW,)),
        (2, None, (NEW, OLD)),
        (2, "slow", (OLD,)),
        (3, "shared", (OLD,)),
        (4, None, ()),
        (5, None, ()),
    ],
)
def test_a_chunk_is_asked_for_in_the_pools_that_have_it_in_order(
    number: int, tier: str | None, pools: tuple[str, ...]
) -> None:
    assert READABLE.candidates(READER, chunk(number), tier) == pools


@pytest.mark.parametrize("keyspace", [OTHER, NEW, WARMING, "f" * 32, ""])
def test_nobody_else_is_told_of_a_pool(keyspace: str) -> None:
    assert not any(READABLE.candidates(keyspace, chunk(number)) for number in range(6))


def test_a_pool_takes_its_own_chunks_in_its_own_tiers_and_a_tenant_any() -> None:
    assert READABLE.admits(WARMING, chunk(4), "shared")
    assert READABLE.admits(WARMING, chunk(4))
    assert not READABLE.admits(WARMING, chunk(4), "slow")
    assert not READABLE.admits(WARMING, chunk(1), "shared")
    assert READABLE.admits(READER, chunk(99), "shared")


def test_a_pool_whose_manifest_is_not_known_gives_and_takes_nothing() -> None:
    readable = Readable.of(view(), {})
    assert not any(readable.candidates(READER, chunk(number)) for number in range(6))
    assert not any(readable.admits(NEW, chunk(number)) for number in range(6))


def test_a_chunk_that_many_pools_have_is_asked_for_in_some() -> None:
    many = tuple(f"{number:032x}" for number in range(3 * MAX_CANDIDATES))
    readable = Readable({READER: many}, dict.fromkeys(many, frozenset({chunk(1)})), dict.fromkeys(many, frozenset()))
    assert readable.candidates(READER, chunk(1)) == many[:MAX_CANDIDATES]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.integers(0, 5)), max_size=4),
    st.lists(st.sampled_from("abcd"), unique=True),
    st.integers(0, 5),
)
def test_what_may_be_read_is_what_is_in_a_pool_that_the_view_lets_the_reader_read(
    contents: dict[str, frozenset[int]], reads: list[str], number: int
) -> None:
    chunks = {pool: frozenset(chunk(one) for one in some) for pool, some in contents.items()}
    granted = tuple(pool for pool in reads if pool in chunks)
    readable = Readable({READER: granted}, chunks, {pool: frozenset() for pool in chunks})
    assert readable.candidates(READER, chunk(number)) == tuple(pool for pool in granted if number in contents[pool])


class TestManifests:
    def test_files_are_read_once_while_they_are_named(self, tmp_path: Path) -> None:
        (tmp_path / MANIFESTS_DIRECTORY).mkdir()
        for digest, packed in (manifest(1, 2), manifest(2, 3), manifest(4)):
            (tmp_path / MANIFESTS_DIRECTORY / digest).write_bytes(packed)
        files = Manifests(tmp_path / MANIFESTS_DIRECTORY)
        assert files.of(view()).chunks == READABLE.chunks
        (tmp_path / MANIFESTS_DIRECTORY / manifest(1, 2)[0]).unlink()
        assert files.of(view()).chunks == READABLE.chunks
        none = CacheView(DOMAIN, 2, 1, Rules(), {})
        assert files.of(none).chunks == {}
        assert files.of(view()).chunks[NEW] == frozenset()

    @pytest.mark.parametrize("content", [b"", b"x" * 32, manifest(1, 2)[1][:-1], manifest(2, 3)[1]])
    def test_a_manifest_that_is_not_what_its_name_says_has_no_chunks(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / manifest(1, 2)[0]).write_bytes(content)
        assert Manifests(tmp_path).of(view()).chunks[NEW] == frozenset()


def enforcement(**fields: object) -> Enforcement:
    made = Enforcement(DOMAIN, lambda **_: NANOSECONDS, lambda: NANOSECONDS)
    made.apply(view(**fields), Readable.of(view(**fields), FILES))  # type: ignore[arg-type]
    return made


class TestPermits:
    def test_a_reader_may_use_the_pools_that_it_reads_and_no_others(self) -> None:
        made = enforcement()
        for pools in ((), (NEW,), (NEW, OLD)):
            assert isinstance(made.enter(READER, lambda: None, pools), Permit)
        assert made.enter(READER, lambda: None, (NEW, WARMING)) is Refusal.NOT_A_READER
        assert made.enter(OTHER, lambda: None, (NEW,)) is Refusal.NOT_A_READER
        assert made.enter("f" * 32, lambda: None, (NEW,)) is Refusal.UNKNOWN_KEYSPACE

    @pytest.mark.parametrize(
        "after", [view(2, ()), view(2, (OLD,)), view(2, readers=(OTHER,))], ids=["removed", "one of two", "gone"]
    )
    def test_what_is_read_on_behalf_of_a_reader_that_may_not_any_more_ends_before_the_acknowledgement(
        self, after: CacheView
    ) -> None:
        made = enforcement()
        aborted = threading.Event()
        permit = made.enter(READER, aborted.set, (NEW, OLD))
        private, other = (made.enter(keyspace, lambda: None) for keyspace in (READER, OTHER))
        assert isinstance(permit, Permit)
        assert isinstance(private, Permit)
        assert isinstance(other, Permit)
        if READER not in after.keyspaces:
            private.release()
        made.apply(after)
        assert not made.settle(grace_s=0.01, timeout_s=0.01)
        assert aborted.is_set()
        assert made.enter(READER, lambda: None, (NEW,)) in (Refusal.NOT_A_READER, Refusal.UNKNOWN_KEYSPACE)
        permit.release()
        assert made.settle(grace_s=0, timeout_s=0)

    def test_what_a_reader_may_still_read_delays_nothing(self) -> None:
        made = enforcement()
        made.enter(READER, lambda: None, (OLD,))
        made.apply(view(2, (OLD,)))
        assert made.settle(grace_s=0, timeout_s=0)


@dataclass(frozen=True)
class Key:
    """As much of LMCache's key as the memory's policy looks at."""

    cache_salt: str
    chunk_hash: bytes


class TestTheMemory:
    def test_what_comes_under_a_pools_keyspace_and_is_none_of_its_chunks_goes(self) -> None:
        index = ScopeIndex()
        for keyspace in (READER, NEW):
            for number in (1, 2, 9):
                index.add(Key(keyspace, chunk(number)), keyspace, 10, computed_s=0.0)
        bounds = {READER: Bounds(), NEW: Bounds(limit_bytes=20)}
        situation = Situation(bounds, {}, {}, lambda _: False, 0.0, 0, READABLE.chunks)
        assert choose(index, situation).victims == {Key(NEW, chunk(9)): Cause.FOREIGN}

    def test_while_it_is_in_use_it_stays_and_counts(self) -> None:
        index = ScopeIndex()
        index.add(Key(NEW, chunk(9)), NEW, 10, computed_s=0.0)
        choice = choose(index, Situation({NEW: Bounds()}, {}, {}, lambda _: True, 0.0, 0, READABLE.chunks))
        assert (choice.victims, choice.locked) == ({}, {NEW: 10})


class TestShares:
    """Blocks of one lookup that several places are asked for, answered in any order."""

    @given(st.data())
    def test_each_block_is_counted_once_as_found_or_missed_and_told_once_if_it_is_there_twice(
        self, data: st.DataObject
    ) -> None:
        places = data.draw(
            st.dictionaries(st.integers(0, 5), st.sets(st.sampled_from(["own", "p", "q"]), min_size=1), max_size=5)
        )
        there = {(number, place): data.draw(st.booleans()) for number, some in places.items() for place in some}
        answers = {place: [n for n, some in places.items() if place in some] for place in ("own", "p", "q")}
        parts = [(place, [number]) for place, numbers in answers.items() for number in numbers]
        twice: list[int] = []
        settled: dict[int, str] = {}
        asked = Counter({number: len(some) for number, some in places.items()})
        shares = Shares(asked, twice.extend, lambda found: settled.update(found))
        found = missed = 0
        for place, numbers in data.draw(st.permutations(parts)):
            # A server may tell of blocks that only one place is asked for, too.
            hits = [number for number in numbers if there[number, place]] + [99]
            counted = shares.answered([*numbers, 99], hits, None if place == "own" else place)
            found, missed = found + counted[0], missed + counted[1]
        anywhere = {number for (number, _), hit in there.items() if hit}
        assert (found, missed) == (len(anywhere), len(places) - len(anywhere))
        in_a_pool = {number for (number, place), hit in there.items() if hit and place != "own"}
        assert sorted(twice) == sorted(n for n in in_a_pool if there.get((n, "own")))
        assert settled.keys() == in_a_pool
        assert all(there[number, place] for number, place in settled.items())


def test_where_a_reader_found_a_chunk_is_remembered_for_a_moment_and_of_so_many() -> None:
    now_s = [0.0]
    known: Recent[tuple[str, bytes], str] = Recent(lambda: now_s[0], keep_s=10, limit=2)
    for member, pool in ((b"1", NEW), (b"2", NEW), (b"1", OLD)):
        known.put((READER, member), pool)
    assert (known.get((READER, b"1")), known.get((OTHER, b"1"))) == (OLD, None)
    known.put((READER, b"3"), NEW)
    assert [known.get((READER, member)) for member in (b"1", b"2", b"3")] == [OLD, None, NEW]
    now_s[0] = 9.9
    assert known.get((READER, b"1")) == OLD
    now_s[0] = 10
    assert known.get((READER, b"1")) is None
    assert known.items() == []

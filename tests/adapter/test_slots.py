"""Slots, maps and redirections, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.store.redis_keys import BUCKETS, bucket_prefix, ledger_key
from kvstrata_sidecar.adapter.redis.client.nodes import Topology
from kvstrata_sidecar.adapter.redis.client.resp import FramingError, NodeAwayError, Reply, ReplyError
from kvstrata_sidecar.adapter.redis.client.slots import (
    SLOTS,
    Address,
    Redirection,
    SlotMap,
    read_slots,
    redirection,
    slot_of,
)

ASKED = Address("10.0.0.1", 6379)


@pytest.mark.parametrize(
    ("key", "slot"),
    [(b"123456789", 12739), (b"foo", 12182), (b"{foo}bar", 12182), (b"a{foo}b{bar}", 12182), (b"{}foo", 9500)],
)
def test_slots_are_those_of_the_cluster_specification(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_an_empty_or_open_tag_is_none() -> None:
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar")
    assert slot_of(b"{foo") != slot_of(b"foo")


def test_all_of_a_bucket_is_in_one_slot_and_buckets_are_spread() -> None:
    slots = set()
    for bucket in range(BUCKETS):
        base = bucket_prefix("d" * 16, "a" * 32, bucket)
        assert slot_of(base.encode()) == slot_of(f"{base}:#s".encode()) == slot_of(f"{base}:{'e' * 16}:0:0:ff".encode())
        slots.add(slot_of(base.encode()))
    assert len(slots) == BUCKETS
    assert slot_of(ledger_key("d" * 16, "a" * 32).encode()) == slot_of(b"{" + b"a" * 32 + b"}")


def entry(first: int, last: int, *servers: list[Reply]) -> list[Reply]:
    return [first, last, *servers]


class TestMaps:
    def test_owners_names_and_replicas_are_read(self) -> None:
        answer: Reply = [
            entry(0, 99, [b"10.0.0.1", 6379, b"a", []], [b"10.0.0.4", 6379, b"d", []]),
            entry(100, 199, [b"10.0.0.2", 6380, b"b", [b"hostname", b"two.internal"]]),
            entry(200, 299, [b"three.internal", 6379, b"c", [b"ip", b"10.0.0.3"]]),
        ]
        read = read_slots(answer, ASKED)
        two, three = Address("10.0.0.2", 6380, "two.internal"), Address("three.internal", 6379)
        assert read.primaries == (ASKED, two, three)
        assert (two.proves, three.proves, ASKED.proves) == ("two.internal", "three.internal", "10.0.0.1")
        assert read.replicas == (Address("10.0.0.4", 6379),)
        assert [read.owners[slot] for slot in (0, 99, 100, 299, 300)] == [0, 0, 1, 2, -1]
        assert read.served == 300

    @pytest.mark.parametrize("host", [None, b""])
    def test_a_server_without_a_host_is_the_one_that_was_asked(self, host: bytes | None) -> None:
        assert read_slots([entry(0, 1, [host, 7000, b"a"])], ASKED).primaries == (Address("10.0.0.1", 7000),)

    def test_a_server_that_has_no_name_to_give_is_reached_by_its_address_or_not_at_all(self) -> None:
        known = read_slots([entry(0, 1, [b"?", 7000, b"a", [b"ip", b"10.0.0.9"]])], ASKED)
        assert known.primaries == (Address("10.0.0.9", 7000),)
        assert read_slots([entry(0, 1, [b"?", 7000, b"a", []])], ASKED).served == 0

    @pytest.mark.parametrize(
        "answer",
        [None, 1, b"x", [1], [[0, 1]], [[0, 16384, [b"h", 1]]], [[5, 4, [b"h", 1]]], [[-1, 4, [b"h", 1]]],
         [[0, 1, [b"h"]]], [[0, 1, [b"h", b"1"]]], [[0, 1, [b"h", 70000]]], [[0, 1, [b"h\r\n", 1]]],
         [[0, 1, [b"h" * 300, 1]]], [[0, 1, [5, 1]]]],
    )  # fmt: skip
    def test_what_is_no_map_is_refused(self, answer: Reply) -> None:
        with pytest.raises(FramingError):
            read_slots(answer, ASKED)

    replies = st.recursive(
        st.none() | st.integers(-5, 20_000) | st.binary(max_size=8), lambda inner: st.lists(inner, max_size=5)
    )

    @given(replies)
    def test_whatever_comes_is_a_map_or_refused(self, answer: Reply) -> None:
        try:
            read = read_slots(answer, ASKED)
        except FramingError:
            return
        assert len(read.owners) == SLOTS
        assert max(read.owners) < len(read.primaries) or not read.primaries


class TestRedirections:
    def test_a_known_server_keeps_its_name(self) -> None:
        two = Address("10.0.0.2", 6380, "two.internal")
        told = redirection(ReplyError("MOVED 3999 10.0.0.2:6380"), ASKED, [ASKED, two])
        assert told == Redirection(3999, two, for_good=True)
        assert redirection(ReplyError("ASK 1 ::1:7"), ASKED, []) == Redirection(1, Address("::1", 7), for_good=False)
        assert redirection(ReplyError("MOVED 1 :7"), ASKED, []) == Redirection(1, Address("10.0.0.1", 7), for_good=True)

    @pytest.mark.parametrize(
        "text",
        ["", "MOVED", "MOVED 1", "MOVED 1 h", "MOVED x h:1", "MOVED 16384 h:1", "MOVED 1 h:0", "MOVED 1 h:65536",
         "MOVED -1 h:1", "MOVED 1 ?:1", "MOVED 1 h h:1", "MOVED 1 a/b:1", "ERR 1 h:1", "MOVED 1 h:\u0661",
         "MOVED \u00b2 h:1"],
    )  # fmt: skip
    def test_what_is_none_is_none(self, text: str) -> None:
        assert redirection(ReplyError(text), ASKED, []) is None


def topology() -> Topology:
    one = Topology([ASKED], cluster=True, clock=lambda: 0.0)
    one.adopt(SlotMap((ASKED, Address("10.0.0.2", 1)), (0,) * 8000 + (1,) * 8000 + (-1,) * 384))
    return one


class TestTopology:
    def test_one_server_has_all_slots_from_the_start(self) -> None:
        single = Topology([ASKED, Address("10.0.0.2", 1)], cluster=False, clock=lambda: 0.0)
        assert {single.node_of(b"%d" % number) for number in range(50)} == set(single.primaries)
        assert single.primaries[0].addresses == (ASKED, Address("10.0.0.2", 1))

    def test_a_slot_without_an_owner_is_nobodys(self) -> None:
        with pytest.raises(NodeAwayError):
            Topology([ASKED], cluster=True, clock=lambda: 0.0).owner(b"x")

    def test_a_stranger_is_followed_only_where_it_has_to_prove_itself(self) -> None:
        told = Redirection(slot_of(b"x"), Address("10.9.9.9", 1), for_good=True)
        cluster = topology()
        before = cluster.node_of(b"x")
        assert cluster.follow(told, strangers=False) is None
        assert cluster.node_of(b"x") is before
        node = cluster.follow(told, strangers=True)
        assert node is not None
        assert cluster.node_of(b"x") is node
        assert node.breaker.closed, "a server in use vouches for it"
        assert node in cluster.primaries

    def test_servers_keep_their_breakers_from_map_to_map(self) -> None:
        cluster = topology()
        first, second = cluster.primaries
        first.breaker.begin_probe()
        first.breaker.probe_succeeded()
        cluster.adopt(SlotMap((ASKED,), (0,) * SLOTS))
        assert cluster.primaries == (first,)
        assert first.breaker.closed
        cluster.adopt(SlotMap((ASKED, Address("10.0.0.2", 1)), (0,) * 8000 + (1,) * 8384))
        assert cluster.primaries[0] is first
        assert second not in cluster.primaries, "what went is forgotten"

    def test_one_server_away_leaves_the_tier_usable_and_is_named(self) -> None:
        cluster = topology()
        first, second = cluster.primaries
        first.breaker.begin_probe()
        first.breaker.probe_succeeded()
        second.breaker.begin_probe()
        second.breaker.probe_failed("gone")
        assert (cluster.state(), cluster.away()) == ("closed", (second,))
        assert cluster.detail() == "1 of 2 servers are away: 10.0.0.2:1: gone"
        cluster.blame(first, "late")
        cluster.blame(first, "late")
        cluster.blame(first, "late")
        assert cluster.state() == "open"

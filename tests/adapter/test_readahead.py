"""What was read ahead is read once, in order, and then nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.redis.client.replies import ReadAhead

CAPACITY, STEP = 32, 8


def giving(data: bytes) -> Callable[[memoryview], int]:
    def receive_into(view: memoryview) -> int:
        view[: len(data)] = data
        return len(data)

    return receive_into


def held(ahead: ReadAhead) -> bytes:
    return bytes(ahead._memory)


def test_bytes_of_a_value_are_overwritten_when_they_were_read() -> None:
    ahead = ReadAhead(CAPACITY, STEP)
    ahead.receive(giving(b"$3\r\nabc\r"))
    assert ahead.find(b"\r\n") == 2
    assert ahead.take(4) == b"$3\r\n"
    target = bytearray(3)
    assert ahead.pour(memoryview(target)) == 3
    assert target == b"abc"
    assert len(ahead) == 1
    assert held(ahead).strip(b"\0") == b"$3\r\n\0\0\0\r"
    ahead.receive(giving(b"secret"))
    ahead.clear()
    assert held(ahead).strip(b"\0") == b"$3\r\n"


def test_bytes_that_are_moved_to_make_room_are_not_left_where_they_were() -> None:
    ahead = ReadAhead(CAPACITY, STEP)
    for number in range(1, CAPACITY // STEP + 1):
        ahead.receive(giving(bytes([number]) * STEP))
    target = bytearray(CAPACITY - 4)
    assert ahead.pour(memoryview(target)) == CAPACITY - 4
    ahead.receive(giving(b"new"))
    assert held(ahead) == bytes([CAPACITY // STEP]) * 4 + b"new" + bytes(CAPACITY - 7)


def test_bytes_that_are_moved_onto_themselves_stay_whole() -> None:
    ahead = ReadAhead(CAPACITY, STEP)
    for number in range(1, CAPACITY // STEP + 1):
        ahead.receive(giving(bytes([number]) * STEP))
    ahead.pour(memoryview(bytearray(STEP)))
    ahead.receive(giving(b"new"))
    assert held(ahead) == b"".join(bytes([number]) * STEP for number in (2, 3, 4)) + b"new" + bytes(STEP - 3)
    ahead.clear()
    assert held(ahead) == bytes(CAPACITY)
    assert len(ahead) == 0


def test_no_more_is_received_than_there_is_room_for() -> None:
    ahead = ReadAhead(CAPACITY, STEP)
    for _ in range(CAPACITY // STEP):
        assert ahead.receive(giving(b"x" * STEP)) == STEP
    with pytest.raises(BufferError):
        ahead.receive(giving(b"x"))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, STEP)), max_size=60))
def test_it_is_a_queue_that_keeps_nothing_but_what_is_in_it(steps: list[tuple[bool, int]]) -> None:
    ahead, expected, number = ReadAhead(CAPACITY, STEP), b"", 0
    for receives, length in steps:
        if receives and len(expected) + STEP <= CAPACITY:
            data = bytes((number + place) % 255 + 1 for place in range(length))
            number += length
            ahead.receive(giving(data))
            expected += data
        else:
            target = bytearray(length)
            count = ahead.pour(memoryview(target))
            assert (count, bytes(target[:count])) == (min(length, len(expected)), expected[:count])
            expected = expected[count:]
        assert len(ahead) == len(expected)
        assert held(ahead).replace(b"\0", b"") == expected

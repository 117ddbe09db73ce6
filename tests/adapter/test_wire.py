"""Replies that are read in one go mean what they mean when they are read closely, or are left to that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata_sidecar.adapter.redis.client.resp import CRLF, MAX_DEPTH, Command, Reply, command, parse, spelled_out

replies: st.SearchStrategy[Reply] = st.recursive(
    st.one_of(st.none(), st.integers(0, 10**15), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def spelled(reply: Reply) -> bytes:
    """What Redis sends."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(spelled, reply))


def depth(reply: Reply) -> int:
    return 1 + max(map(depth, reply), default=0) if isinstance(reply, list) else 0


def plain(reply: Reply) -> bool:
    """Whether no string in it contains an end of line."""
    return all(map(plain, reply)) if isinstance(reply, list) else not (isinstance(reply, bytes) and CRLF in reply)


@given(replies, st.binary(max_size=20))
def test_a_whole_reply_is_read_as_it_was_sent_or_left_to_a_closer_look(reply: Reply, more: bytes) -> None:
    sent = spelled(reply)
    lines = (sent + more).split(CRLF)
    read, behind = parse(lines, 0)
    if behind >= 0:
        assert read == reply
        assert CRLF.join(lines[:behind]) + CRLF == sent
    else:
        assert depth(reply) > MAX_DEPTH or not plain(reply), "nothing else is left"


@given(replies, st.data())
def test_a_reply_that_is_not_whole_is_never_taken(reply: Reply, data: st.DataObject) -> None:
    sent = spelled(reply)
    cut = data.draw(st.integers(0, len(sent) - 1))
    assert parse(sent[:cut].split(CRLF), 0)[1] == -1


@given(st.binary(max_size=60))
def test_whatever_comes_is_taken_or_left_alone(data: bytes) -> None:
    lines = data.split(CRLF)
    _, behind = parse(lines, 0)
    if behind >= 0 and not data.startswith(b"+"):
        taken = CRLF.join(lines[:behind]) + CRLF
        assert data.startswith(taken)


def test_depth_is_bounded() -> None:
    assert parse((b"*1\r\n" * 5000).split(CRLF), 0)[1] == -1


def test_errors_and_negative_numbers_are_left_to_a_closer_look() -> None:
    for line in (b"-OOM no\r\n", b":-5\r\n", b"$x\r\n", b"$3\r\nab\r\n", b"?\r\n", b":\r\n", b"*2\r\n:1\r\n-ERR\r\n"):
        assert parse(line.split(CRLF), 0)[1] == -1, line


@given(st.lists(st.one_of(st.binary(max_size=20), st.integers(250, 300).map(bytes)), min_size=1, max_size=5))
def test_a_command_is_sent_as_an_array_of_its_arguments(arguments: list[bytes]) -> None:
    assert command(*arguments) == spelled([*arguments])


def test_a_script_is_spelled_out_also_where_its_digest_was_encoded_beforehand() -> None:
    asked = Command(b"k", (b"EVALSHA", b"digest"), otherwise=(b"EVAL", b"text"), encoded=command(b"EVALSHA", b"digest"))
    assert spelled_out(asked) == Command(b"k", (b"EVAL", b"text"), asked.read)

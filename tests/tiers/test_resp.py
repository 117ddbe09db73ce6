"""The transport against a real Redis and against servers that lie, stall or die."""

from __future__ import annotations

import _ssl
import contextlib
import ctypes
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstrata.contract.store.block_value import HEADER_BYTES, Header, pack_header
from kvstrata_sidecar.adapter.params import TlsParams
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.resp import (
    PING,
    AccessError,
    Command,
    FramingError,
    PeerClosedError,
    PeerTimeoutError,
    Read,
    Reply,
    ReplyError,
    TransportError,
)
from kvstrata_sidecar.adapter.tier.encryption import PlainSealer
from kvstrata_sidecar.adapter.tier.sealer import Opening
from tests.tiers.certificates import SERVER_NAME, issue
from tests.tiers.eraser import set_value
from tests.tiers.hostile_server import Answer, HostileServer, says
from tests.tiers.redis_process import RedisProcess

pytestmark = pytest.mark.redis
Connect = Callable[..., Connection]

ERR_LIB_SYS = 2
KEY, OTHER_KEY = b"kvs1:key", b"kvs1:other"
SHORT_MS, SOON_S = 1000, 15.0
"""The time limit of what a test has time out, and what it may take on a busy machine; what hangs takes twice that."""

BLOCK = bytes(range(256)) * 4096


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


@pytest.fixture
def hostile() -> Iterator[Callable[[Answer], HostileServer]]:
    servers: list[HostileServer] = []

    def start(answer: Answer) -> HostileServer:
        servers.append(HostileServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class PlainRead(Read):
    """A value that counts in any case, into an opening that is there already."""

    before: Sequence[Command] = ()

    def __init__(self, key: bytes, opening: Opening) -> None:
        self.key = key
        self._opening = opening

    def accept(self, answers: Sequence[Any]) -> bool:
        return True

    def open(self) -> Opening:
        return self._opening

    def take(self, opening: Opening) -> bool:
        return True


def read(connection: Connection, size: int = len(BLOCK), key: bytes = KEY) -> bytes | None:
    buffer = bytearray(size)
    opening = PlainSealer().open_into("", key, memoryview(buffer))
    (outcome,) = connection.get_each([PlainRead(key, opening)])
    if isinstance(outcome, ReplyError):
        raise outcome
    return bytes(buffer) if outcome else None


def write(connection: Connection, key: bytes, block: bytes) -> None:
    set_value(connection, key, PlainSealer().seal("", key, memoryview(block), 0), 60_000)


def exist(connection: Connection, keys: list[bytes]) -> list[bool]:
    def read(reply: Reply) -> bool:
        if reply not in (0, 1):
            raise FramingError("EXISTS of one key is 0 or 1")
        return reply == 1

    return connection.ask([Command(key, (b"EXISTS", key), read) for key in keys])


class TestARealRedis:
    def test_a_block_comes_back_as_it_went(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port)
        write(connection, KEY, BLOCK)
        assert read(connection) == BLOCK
        assert 0 < redis_server.admin().pttl(KEY) <= 60_000

    def test_empty_and_odd_sizes_come_back(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port)
        for size in (0, 1, 4095, 4096, 4097, 70_001):
            write(connection, KEY, BLOCK[:size])
            assert read(connection, size) == BLOCK[:size]

    def test_a_key_that_is_not_there_is_a_miss(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port)
        assert read(connection) is None
        assert connection.usable

    def test_a_key_that_vanished_after_the_lookup_is_a_miss(
        self, redis_server: RedisProcess, connect_to: Connect
    ) -> None:
        connection = connect_to(redis_server.port)
        write(connection, KEY, BLOCK)
        assert exist(connection, [KEY]) == [True]
        redis_server.admin().delete(KEY)
        assert read(connection) is None

    def test_a_value_of_another_length_is_a_miss(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        write(connect_to(redis_server.port), KEY, BLOCK)
        for size in (len(BLOCK) - 1, len(BLOCK) + 1, 0):
            assert read(connect_to(redis_server.port), size) is None

    def test_a_value_copied_to_another_key_is_a_miss(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port)
        write(connection, KEY, BLOCK)
        redis_server.admin().copy(KEY.decode(), OTHER_KEY.decode())
        assert read(connection, key=OTHER_KEY) is None

    def test_lookups_and_deletions_answer_each_key(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port)
        names = [b"kvs1:%d" % number for number in range(3000)]
        redis_server.admin().mset(dict.fromkeys(names[::2], b"x"))
        assert exist(connection, names) == [True, False] * 1500
        assert connection.ask([Command(name, (b"UNLINK", name)) for name in names[:2]]) == [1, 0]
        assert exist(connection, names[:2]) == [False, False]

    def test_out_of_memory_is_an_error_after_which_reads_are_right(
        self, redis_server: RedisProcess, connect_to: Connect
    ) -> None:
        connection = connect_to(redis_server.port)
        write(connection, KEY, BLOCK)
        redis_server.admin().config_set("maxmemory", 1)
        with pytest.raises(ReplyError, match="OOM"):
            write(connection, OTHER_KEY, BLOCK)
        assert read(connection) == BLOCK
        assert read(connection, key=OTHER_KEY) is None

    def test_a_key_of_another_type_is_an_error_after_which_reads_are_right(
        self, redis_server: RedisProcess, connect_to: Connect
    ) -> None:
        connection = connect_to(redis_server.port)
        write(connection, KEY, BLOCK)
        redis_server.admin().rpush(OTHER_KEY.decode(), "x")
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            read(connection, key=OTHER_KEY)
        assert read(connection) == BLOCK

    def test_a_frozen_server_times_out(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port, io_timeout_ms=SHORT_MS)
        redis_server.freeze()
        started_s = time.monotonic()
        with pytest.raises(PeerTimeoutError):
            read(connection)
        assert time.monotonic() - started_s < SOON_S
        redis_server.thaw()
        with pytest.raises(PeerClosedError):
            read(connection)

    def test_a_frozen_server_stops_a_store_in_the_middle(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port, io_timeout_ms=SHORT_MS)
        redis_server.freeze()
        with pytest.raises(PeerTimeoutError):
            write(connection, KEY, bytes(64 << 20))
        redis_server.thaw()
        assert not connection.usable

    def test_a_server_that_died_while_idle_is_noticed_before_anything_is_sent(
        self, redis_server: RedisProcess, connect_to: Connect
    ) -> None:
        connection = connect_to(redis_server.port)
        redis_server.kill()
        with pytest.raises(PeerClosedError):
            read(connection)

    def test_the_password_is_read_at_each_connect(
        self, redis_server: RedisProcess, connect_to: Connect, tmp_path: Path
    ) -> None:
        admin = redis_server.admin()
        admin.acl_setuser("data", enabled=True, passwords=["+first"], categories=["+@all"], keys=["*"])
        file = tmp_path / "password"
        options = {"username": "data", "password_file": str(file)}
        with pytest.raises(AccessError, match="cannot be read"):
            connect_to(redis_server.port, **options)
        file.write_text("wrong\n")
        with pytest.raises(AccessError, match="WRONGPASS"):
            connect_to(redis_server.port, **options)
        file.write_text("first\n")
        assert read(connect_to(redis_server.port, **options)) is None

    def test_a_missing_password_is_refused(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        redis_server.admin().config_set("requirepass", "secret")
        with pytest.raises(AccessError, match="NOAUTH"):
            connect_to(redis_server.port)

    def test_an_abort_ends_a_read_under_way(self, redis_server: RedisProcess, connect_to: Connect) -> None:
        connection = connect_to(redis_server.port)
        redis_server.freeze()
        timer = threading.Timer(0.1, connection.abort)
        timer.start()
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            read(connection)
        assert time.monotonic() - started_s < SOON_S
        redis_server.thaw()


class TestTls:
    @pytest.fixture
    def tls_server(self, tmp_path: Path) -> Iterator[RedisProcess]:
        server = RedisProcess(tmp_path, tls=issue(tmp_path).redis_options)
        server.start()
        yield server
        server.kill()

    def test_a_block_comes_back_as_it_went(self, tls_server: RedisProcess, connect_to: Connect, tmp_path: Path) -> None:
        connection = connect_to(tls_server.port, tls=TlsParams(str(tmp_path / "ca.crt"), SERVER_NAME))
        write(connection, KEY, BLOCK)
        assert read(connection) == BLOCK
        assert read(connection, key=OTHER_KEY) is None
        assert exist(connection, [KEY, OTHER_KEY]) == [True, False]

    def test_another_name_is_refused(self, tls_server: RedisProcess, connect_to: Connect, tmp_path: Path) -> None:
        with pytest.raises(AccessError, match="not trusted"):
            connect_to(tls_server.port, tls=TlsParams(str(tmp_path / "ca.crt"), "another.internal"))

    def test_another_ca_is_refused(self, tls_server: RedisProcess, connect_to: Connect, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = issue(tmp_path / "other")
        with pytest.raises(AccessError, match="not trusted"):
            connect_to(tls_server.port, tls=TlsParams(str(other.ca), SERVER_NAME))

    def test_a_server_without_tls_is_an_error_in_time(
        self, redis_server: RedisProcess, connect_to: Connect, tmp_path: Path
    ) -> None:
        ca = issue(tmp_path).ca
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            connect_to(redis_server.port, tls=TlsParams(str(ca), SERVER_NAME), connect_timeout_ms=SHORT_MS)
        assert time.monotonic() - started_s < SOON_S

    def test_a_frozen_server_times_out_and_an_abort_ends_a_read(
        self, tls_server: RedisProcess, connect_to: Connect, tmp_path: Path
    ) -> None:
        tls = TlsParams(str(tmp_path / "ca.crt"), SERVER_NAME)
        timing_out, aborted = (
            connect_to(tls_server.port, tls=tls, io_timeout_ms=SHORT_MS),
            connect_to(tls_server.port, tls=tls),
        )
        tls_server.freeze()
        with pytest.raises(PeerTimeoutError):
            read(timing_out)
        threading.Timer(0.1, aborted.abort).start()
        with pytest.raises(TransportError):
            read(aborted)
        tls_server.thaw()

    def test_an_error_that_stays_in_openssls_queue_fails_no_later_connection(
        self, tls_server: RedisProcess, connect_to: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tls = TlsParams(str(tmp_path / "ca.crt"), SERVER_NAME)
        openssl = ctypes.CDLL(_ssl.__file__)

        def as_with_openssl_3_4(_: bytes) -> None:
            openssl.ERR_new()
            openssl.ERR_set_error(ERR_LIB_SYS, errno.EPIPE, None)
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        broken = connect_to(tls_server.port, tls=tls)
        monkeypatch.setattr(broken._socket, "sendall", as_with_openssl_3_4)
        with pytest.raises(PeerClosedError):
            broken.ask([PING])
        assert openssl.ERR_peek_error() == 0
        connect_to(tls_server.port, tls=tls).ask([PING])


SEALED = b"".join(PlainSealer().seal("", KEY, memoryview(BLOCK), 0))

LIES = {
    "a value of another key": bulk(pack_header(OTHER_KEY, Header(len(BLOCK))) + SEALED[HEADER_BYTES:]),
    "a longer value": bulk(SEALED + b"x"),
    "a shorter value": bulk(SEALED[:-1]),
    "a value without a header": bulk(bytes(HEADER_BYTES) + SEALED[HEADER_BYTES:]),
    "a value longer than it says": b"$%d\r\n%bxx\r\n" % (len(SEALED), SEALED),
    "a second reply": bulk(SEALED) + bulk(SEALED),
    "a number": b":1\r\n",
    "a status": b"+OK\r\n",
    "an array": b"*1\r\n" + bulk(SEALED),
    "a length that is no number": b"$1e6\r\n" + SEALED,
    "a negative length": b"$-2\r\n",
    "an absurd length": b"$99999999999999999999\r\n",
    "garbage": b"\x00\xff" * 64 + b"\r\n",
    "a line without end": b"+" + b"x" * 100_000,
    "an error of the protocol": b"-ERR Protocol error: invalid bulk length\r\n",
    "half a header": b"$10",
    "half a value": b"$%d\r\n%b" % (len(SEALED), SEALED[: len(SEALED) // 2]),
    "nothing": b"",
}


@pytest.mark.parametrize("then_close", [False, True], ids=["stays", "closes"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_no_lie_is_taken_for_a_block_and_none_is_waited_for(
    lie: bytes, then_close: bool, hostile: Callable[[Answer], HostileServer], connect_to: Connect
) -> None:
    connection = connect_to(hostile(says(lie, then_close=then_close)).port, io_timeout_ms=SHORT_MS)
    started_s = time.monotonic()
    try:
        value = read(connection)
        # "a second reply" may arrive after the first was read in full and right.
        assert value is None or (lie == LIES["a second reply"] and value == BLOCK)
    except (TransportError, ReplyError):
        assert not connection.usable
    assert time.monotonic() - started_s < SOON_S


def test_bytes_that_came_unasked_are_never_an_answer(
    hostile: Callable[[Answer], HostileServer], connect_to: Connect
) -> None:
    go_on, went_on = threading.Event(), threading.Event()

    def answer_and_go_on(peer: socket.socket, _: list[bytes]) -> None:
        peer.sendall(bulk(SEALED))
        go_on.wait(60)
        peer.sendall(bulk(SEALED)[:4096])
        went_on.set()

    connection = connect_to(hostile(answer_and_go_on).port)
    assert read(connection) == BLOCK
    go_on.set()
    assert went_on.wait(60)
    with pytest.raises(FramingError):
        read(connection)
    assert not connection.usable


def test_a_trickle_is_ended_by_an_abort(hostile: Callable[[Answer], HostileServer], connect_to: Connect) -> None:
    def trickle(peer: socket.socket, _: list[bytes]) -> None:
        peer.sendall(b"$%d\r\n" % len(SEALED))
        for byte in SEALED:
            peer.sendall(bytes([byte]))
            time.sleep(0.05)

    connection, aborted = connect_to(hostile(trickle).port), threading.Event()

    def abort() -> None:
        aborted.set()
        connection.abort()

    threading.Timer(0.5, abort).start()
    started_s = time.monotonic()
    with pytest.raises(TransportError):
        read(connection)
    assert aborted.is_set()
    assert time.monotonic() - started_s < SOON_S


@pytest.mark.parametrize(
    "reply", [b":2\r\n", b"+1\r\n", b"$1\r\n1\r\n", b":-1\r\n", b":1\r\n:1\r\n:1\r\n", b":1\r\n", b""]
)
def test_no_lie_is_taken_for_a_hit(
    reply: bytes, hostile: Callable[[Answer], HostileServer], connect_to: Connect
) -> None:
    peer = hostile(lambda connection, arguments: connection.sendall(reply if arguments[1] == OTHER_KEY else b""))
    connection = connect_to(peer.port, io_timeout_ms=SHORT_MS)
    with pytest.raises(TransportError):
        exist(connection, [KEY, OTHER_KEY])
    assert not connection.usable


def test_a_greeting_that_trickles_is_given_up_in_time(connect_to: Connect) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            while not stop.wait(0.05):
                peer.sendall(b"+")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    started_s = time.monotonic()
    with pytest.raises(TransportError):
        connect_to(listener.getsockname()[1], connect_timeout_ms=SHORT_MS, io_timeout_ms=SHORT_MS)
    assert time.monotonic() - started_s < SOON_S
    stop.set()
    listener.close()

"""The guard's decisions, without an engine."""

from __future__ import annotations

import pytest

from kvstrata_sidecar.connector.failures import (
    CHUNK_TOKENS_KEY,
    LOOKUP_PATIENCE_KEY,
    START_PATIENCE_KEY,
    Patience,
    absorb,
    chunk_tokens,
    wait_for_server,
)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Server:
    """Raises ConnectionError until it is up."""

    def __init__(self, time: Time, up_at_s: float) -> None:
        self._time, self._up_at_s = time, up_at_s
        self.tries = 0

    def connect(self) -> str:
        self.tries += 1
        if self._time.now_s < self._up_at_s:
            raise ConnectionError("nobody listens")
        return "connected"


def test_a_server_that_comes_up_late_is_waited_for() -> None:
    time = Time()
    server = Server(time, up_at_s=30)
    assert wait_for_server(server.connect, 60, clock=time.clock, sleep=time.sleep) == "connected"
    assert server.tries == 31


def test_a_server_that_never_comes_up_ends_the_patience() -> None:
    time = Time()
    with pytest.raises(ConnectionError):
        wait_for_server(Server(time, up_at_s=1000).connect, 60, clock=time.clock, sleep=time.sleep)
    assert time.now_s == 60


def test_a_configuration_that_is_wrong_is_not_waited_for() -> None:
    def misconfigured() -> None:
        raise ValueError("the chunk size does not fit")

    with pytest.raises(ValueError, match="chunk size"):
        wait_for_server(misconfigured, 60)


def test_what_is_raised_is_absorbed_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise TimeoutError("PREPARE_STORE timed out")

    assert absorb("a store", fail, lambda: "a miss") == "a miss"
    assert "PREPARE_STORE timed out" in caplog.text
    assert absorb("a store", lambda: "stored", lambda: "a miss") == "stored"


def test_patience_is_read_from_the_connectors_configuration() -> None:
    assert Patience.from_extra_config(None) == Patience()
    assert Patience.from_extra_config({START_PATIENCE_KEY: 7, LOOKUP_PATIENCE_KEY: "0.5"}) == Patience(7.0, 0.5)
    with pytest.raises(ValueError, match="positive"):
        Patience.from_extra_config({LOOKUP_PATIENCE_KEY: 0})


def test_the_servers_chunk_size_is_read_from_the_connectors_configuration() -> None:
    assert chunk_tokens(None) is None
    assert chunk_tokens({CHUNK_TOKENS_KEY: 256}) == 256
    for wrong in (0, -1, "256", True, 2.5):
        with pytest.raises(ValueError, match="positive"):
            chunk_tokens({CHUNK_TOKENS_KEY: wrong})


def test_a_failures_wait_is_told(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([10.0, 10.25])

    def fail() -> str:
        raise ConnectionError("closed")

    absorb("a store", fail, lambda: "a miss", clock=lambda: next(times))
    assert "after 250 ms" in caplog.text

"""An engine whose cache server is away at its start, without either: what is taken for the chunk size, and kept."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.dataplane.lmcache_stand_in import ADAPTER, load, play

PROMISED = 64


@dataclass
class Server:
    """A cache server with a chunk size, or one that fails to answer."""

    tokens: int = PROMISED
    failure: Exception | None = None

    def ask(self, client: object, timeout: float) -> int:
        if self.failure is not None:
            raise self.failure
        return self.tokens


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    play(monkeypatch, found.ask)
    return found


@pytest.fixture
def guard(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The guard, with LMCache played."""
    return load(monkeypatch)


def ask_as_lmcache_does(client: object) -> int:
    return int(sys.modules[ADAPTER].get_lmcache_chunk_size(client, timeout=1.0))


@pytest.mark.parametrize("failure", [TimeoutError(), ConnectionError()])
def test_without_an_answer_the_promise_is_taken_and_the_server_counts_as_absent(
    guard: Any, server: Server, failure: Exception
) -> None:
    server.failure = failure
    client = object()
    with guard.chunk_size_promised(PROMISED) as found:
        assert ask_as_lmcache_does(client) == PROMISED
    assert found == [client]
    with pytest.raises(type(failure)):
        ask_as_lmcache_does(client)


def test_a_server_that_answers_is_believed_and_not_absent(guard: Any, server: Server) -> None:
    server.tokens = 256
    with guard.chunk_size_promised(PROMISED) as found:
        assert ask_as_lmcache_does(object()) == 256
    assert found == []


def test_without_a_promise_a_server_that_does_not_answer_is_a_failure(guard: Any, server: Server) -> None:
    server.failure = TimeoutError()
    with guard.chunk_size_promised(None), pytest.raises(TimeoutError):
        ask_as_lmcache_does(object())


def test_a_server_that_appears_with_the_promised_chunk_size_is_used(guard: Any) -> None:
    assert guard.keeps_promise(object(), PROMISED) is True


def test_a_server_with_another_chunk_size_is_never_used(
    guard: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.tokens = 256
    assert guard.keeps_promise(object(), PROMISED) is False
    assert "chunks are of 256 tokens, and the engine was started for 64" in caplog.text


@pytest.mark.parametrize("failure", [TimeoutError(), ConnectionError(), BlockingIOError("no room")])
def test_a_server_that_does_not_tell_is_asked_again(guard: Any, server: Server, failure: Exception) -> None:
    server.failure = failure
    assert guard.keeps_promise(object(), PROMISED) is False
    server.failure = None
    assert guard.keeps_promise(object(), PROMISED) is True

"""Which requests the guard looks up, without an engine: a lookup locks blocks until its answer is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.dataplane.lmcache_stand_in import RequestState, Role, load, play


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler's connector."""
    play(monkeypatch, lambda client, timeout: 64)
    guard = load(monkeypatch)
    transfer = SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute")
    return guard.GuardedConnector(SimpleNamespace(kv_transfer_config=transfer), Role.SCHEDULER)


def request(*, skip_reading_prefix_cache: bool) -> SimpleNamespace:
    return SimpleNamespace(request_id="request", skip_reading_prefix_cache=skip_reading_prefix_cache)


def test_a_request_whose_answer_would_be_dropped_is_not_looked_up(scheduler: Any) -> None:
    asked = request(skip_reading_prefix_cache=True)
    for _ in range(2):  # vLLM asks again while there is no room for the request
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert scheduler.happened == []
    # Admitted in this state, the request is stored as any other.
    assert scheduler.request_trackers["request"].state == RequestState.BYPASS_LMCACHE


def test_any_other_request_is_looked_up_once(scheduler: Any) -> None:
    asked = request(skip_reading_prefix_cache=False)
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (None, True)
    assert scheduler.happened == ["looked up"]

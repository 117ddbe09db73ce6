"""Which requests the guard looks up, without an engine: a lookup locks blocks until its answer is used."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.contract.messages.engine_identity import IDENTITY_FILE, UNRESOLVED, EngineIdentity, fingerprint_in
from kvstrata_sidecar.upstream.resolved_identity import IDENTITY_DIRECTORY_KEY
from kvstrata_sidecar.upstream.v0_5_6.lookups import GIVE_UP_S, POLL_S, Lookups
from tests.dataplane.fresh import until
from tests.dataplane.lmcache_stand_in import Client, RequestState, Role, SchedulerAdapter, load, play
from tests.tiers.gate_stand_in import FINGERPRINT


def connector(
    monkeypatch: pytest.MonkeyPatch, fingerprint: str = FINGERPRINT, role: Role = Role.SCHEDULER, **extra: Any
) -> Any:
    play(monkeypatch, lambda client, timeout: 64)
    guard = load(monkeypatch, fingerprint)
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy="recompute")
    return guard.GuardedConnector(SimpleNamespace(kv_transfer_config=transfer), role)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler's connector."""
    return connector(monkeypatch)


def request(*, skip_reading_prefix_cache: bool) -> SimpleNamespace:
    return SimpleNamespace(request_id="request", skip_reading_prefix_cache=skip_reading_prefix_cache)


@pytest.mark.claim("a request that ends leaves no lock in the cache server")
def test_a_request_whose_answer_would_be_dropped_is_not_looked_up(scheduler: Any) -> None:
    asked = request(skip_reading_prefix_cache=True)
    for _ in range(2):  # vLLM asks again while there is no room for the request
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert scheduler.happened == []
    # Admitted in this state, the request is stored as any other.
    assert scheduler.request_trackers["request"].state == RequestState.BYPASS_LMCACHE


def test_the_engines_fingerprint_is_in_the_keys_of_both_roles_and_the_scheduler_reports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for role in Role:
        with monkeypatch.context() as patched:
            made = connector(patched, role=role, **{IDENTITY_DIRECTORY_KEY: str(tmp_path)})
        assert fingerprint_in(made.model_name) == FINGERPRINT
        assert made.model_name.startswith("model")
    (report,) = tmp_path.iterdir()
    assert report.name == IDENTITY_FILE
    assert EngineIdentity.decode(report.read_bytes()) == EngineIdentity(FINGERPRINT)


def test_without_a_fingerprint_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connector(monkeypatch, fingerprint="")
    assert fingerprint_in(made.model_name) == UNRESOLVED
    assert made.get_num_new_matched_tokens(request(skip_reading_prefix_cache=False), 0) == (0, False)
    assert made.happened == []


def test_any_other_request_is_looked_up_once(scheduler: Any) -> None:
    asked = request(skip_reading_prefix_cache=False)
    for _ in range(2):
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (None, True)
    assert scheduler.happened == ["looked up"]


def test_an_answer_that_takes_several_calls_is_taken_in_one_after_a_long_step(scheduler: Any) -> None:
    """LMCache takes a receipt first, then asks, then takes the answer; the engine's steps take longer than patience."""
    answers = iter([None, None, None, 64])
    ask = scheduler.__class__.__mro__[1].get_num_new_matched_tokens

    def slow(connector: Any, asked: Any, computed: int) -> tuple[int | None, bool]:
        ask(connector, asked, computed)
        return next(answers), True

    scheduler.__class__.__mro__[1].get_num_new_matched_tokens = slow
    try:
        asked = request(skip_reading_prefix_cache=False)
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (None, True)
        scheduler.request_trackers["request"].lookup_started_at -= 60
        scheduler._step_began_s -= 60
        assert scheduler.get_num_new_matched_tokens(asked, 0) == (64, True)
    finally:
        scheduler.__class__.__mro__[1].get_num_new_matched_tokens = ask


def test_a_lookup_without_an_answer_is_given_up_after_its_patience(scheduler: Any) -> None:
    asked = request(skip_reading_prefix_cache=False)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (None, True)
    scheduler.request_trackers["request"].lookup_started_at -= 60
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)


@pytest.mark.parametrize(("step_s", "calls"), [(0.0, 1), (60.0, 3)])
def test_a_slow_lookup_lengthens_no_short_step_however_long_it_takes(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, step_s: float, calls: int
) -> None:
    asked = request(skip_reading_prefix_cache=False)
    counted: list[int] = []
    ask = scheduler.__class__.__mro__[1].get_num_new_matched_tokens

    def slow(connector: Any, asked: Any, computed: int) -> tuple[int | None, bool]:
        counted.append(computed)
        ask(connector, asked, computed)
        return (64 if len(counted) == 4 else None), True

    monkeypatch.setattr(scheduler.__class__.__mro__[1], "get_num_new_matched_tokens", slow)
    monkeypatch.setitem(scheduler.__class__.get_num_new_matched_tokens.__globals__, "LONG_STEP_S", 30.0)
    scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.request_trackers["request"].lookup_started_at -= 4
    scheduler._step_began_s -= step_s
    scheduler.get_num_new_matched_tokens(asked, 0)
    assert len(counted) == 1 + calls


class Ending:
    """A lookup of 192 tokens that was sent, and the adapter and server of it."""

    def __init__(self) -> None:
        self.client = Client()
        self.adapter = SchedulerAdapter(req_clients={"server": self.client})
        self.lookups = Lookups(self.adapter)
        self.adapter.maybe_submit_lookup_request("r", [1] * 192, cache_salt="salt")
        self.receipt = self.adapter._unacked_lookups["r"].futures["server"]

    def answer(self, number: int, asked: str, value: Any = None) -> None:
        """Answer a request of this lookup, once it is there."""
        until(lambda: len(self.client.asked) > number)
        assert self.client.asked[number][0] == asked
        self.client.asked[number][1].set(value)

    def is_over(self) -> bool:
        return not self.lookups.is_ending("r")


@pytest.mark.claim("a request that ends leaves no lock, no lookup and no session in the cache server")
def test_a_lookup_whose_request_ends_is_answered_then_released_and_then_its_session_ends() -> None:
    ending = Ending()
    ending.lookups.abandon("r")
    ending.adapter.end_session("r")
    time.sleep(3 * POLL_S)
    assert ending.client.asked == []
    ending.receipt.set()
    ending.answer(0, "status of r", None)
    ending.answer(1, "status of r", 2)
    assert ending.client.ended == []
    ending.answer(2, "free r 0-128 salt")
    until(ending.is_over)
    until(lambda: ending.client.ended == ["r"])


def test_an_answer_that_the_engine_has_is_not_asked_for_again() -> None:
    ending = Ending()
    ending.receipt.set()
    ending.adapter._per_server_hits["r"] = {"server": 3}
    ending.lookups.abandon("r")
    ending.answer(0, "free r 0-192 salt")
    until(ending.is_over)
    ending.adapter.end_session("r")
    assert ending.client.ended == ["r"]


def test_an_admitted_request_keeps_its_answer_and_one_without_is_abandoned() -> None:
    ending = Ending()
    ending.receipt.set()
    ending.adapter._finished_lookup_results["r"] = 128
    ending.lookups.used("r")
    assert ending.is_over()
    other = Ending()
    other.lookups.used("r")
    assert not other.is_over()
    other.receipt.set()
    other.answer(0, "status of r", 0)
    until(other.is_over)
    assert len(other.client.asked) == 1


def test_a_server_that_never_answers_is_given_up_when_its_locks_have_expired() -> None:
    ending = Ending()
    moments = iter([0.0, GIVE_UP_S - 1, GIVE_UP_S])
    ending.lookups._clock = lambda: next(moments)
    ending.lookups.abandon("r")
    ending.adapter.end_session("r")
    until(lambda: ending.client.ended == ["r"])

"""The API server away for longer than staleAfter: requests are answered without reuse, which returns with it.

Requests that run meanwhile end whole; one of ten minutes shows it with the default values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import pytest

from e2e.cluster.component import Component
from e2e.cluster.settings import Paths
from e2e.product.chapters import ACME_KEY, MODEL, Stage, raise_generation
from e2e.product.direct_operator import Operators
from e2e.product.direct_stage import domain_rules, of_gate, restarts, tenants_ask
from e2e.product.faults import Victim
from e2e.product.install import DEMO_NAMESPACE, SYSTEM_NAMESPACE, unsettled
from e2e.product.kubectl import CommandError, Kubectl, wait_until
from e2e.product.prompts import WHOLE_CHUNKS, fresh_prompt
from e2e.product.streams import streaming

pytestmark = pytest.mark.cluster

STALE_AFTER_S = 10
HANGS_S = 15.0
"""A request that waited for the API server would take as long as it is away, or a time-out."""

DEFAULTS = dict.fromkeys(("staleAfter", "drainTimeout", "maxRequestDuration", "onStale"))
"""Absent fields: staleAfter is five minutes then, maxRequestDuration fifteen."""

BEFORE_S, AWAY_S, STREAM_S = 60.0, 360.0, 600.0
STREAM_TOKENS, TOKENS_IN_S = 1600, 2.5
"""An engine on a CPU would make them in a minute or two: it is stopped while it is ahead of this."""


@pytest.fixture
def api_server(kubectl: Kubectl) -> Iterator[Component]:
    """The cluster's API server; it runs again afterwards, and everything is settled."""
    with _api_server(kubectl, {"staleAfter": f"{STALE_AFTER_S}s"}) as component:
        yield component


@pytest.fixture
def api_server_by_default(kubectl: Kubectl) -> Iterator[Component]:
    """The same, with a domain that has the default values."""
    with _api_server(kubectl, DEFAULTS) as component:
        yield component


@contextmanager
def _api_server(kubectl: Kubectl, rules: Mapping[str, str | None]) -> Iterator[Component]:
    Operators(kubectl).fresh()
    with domain_rules(kubectl, dict(rules)):
        yield Component(Paths().node / "control-plane", "kube-apiserver")
        _serves(kubectl)
        Operators(kubectl).acting()
    wait_until("everything is ready and enforced", lambda: not unsettled(kubectl))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Component.paused, id="hangs"),
        pytest.param(
            Component.killed,
            id="is gone",
            marks=pytest.mark.claim("without the API server requests are answered, without reuse after staleAfter"),
        ),
    ],
)
def test_requests_are_answered_without_reuse_until_the_api_server_returns(
    kubectl: Kubectl,
    near: Stage,
    api_server: Component,
    fault: Callable[[Component], AbstractContextManager[None]],
) -> None:
    before = restarts(kubectl)
    with tenants_ask(near) as running:
        running.wait_for(4)
        # The last good read was sent before this.
        with fault(api_server):
            away_at = fresh_at = time.monotonic()

            def fenced() -> bool:
                nonlocal fresh_at
                asked_at, fresh = time.monotonic(), of_gate(near, "kvstrata_gate_policy_fresh")
                if any(fresh):
                    fresh_at = asked_at
                return fresh == [0, 0]

            wait_until("both gates fence", fenced)
            # Requests that the gates admitted before are answered by now.
            running.wait_for(4)
            quiet_at = time.monotonic()
            running.wait_for(8)
            account = running.account
        back_at = time.monotonic()
        early, late = account.since(away_at).until(away_at + 0.5 * STALE_AFTER_S), account.since(quiet_at)
        near.report(f"fresh until {fresh_at - away_at:.1f} s after the API server went: {account.since(away_at)}")
        assert early.cached_tokens, "no request was made"
        assert min(early.cached_tokens) >= WHOLE_CHUNKS, f"hits ended before staleAfter: {early.cached_tokens}"
        assert fresh_at - away_at < STALE_AFTER_S + 1, "the gates fence too late"
        assert set(late.cached_tokens) == {0}, f"a fenced gate reused: {late.cached_tokens}"

        _serves(kubectl)
        # They retry at most every 30 seconds.
        wait_until("both gates confirm their policy", lambda: of_gate(near, "kvstrata_gate_policy_fresh") == [1, 1])
        near.report(f"gates confirm their policy {time.monotonic() - back_at:.1f} s after the API server's return")

        def reused() -> bool:
            since = time.monotonic()
            running.wait_for(6)
            return min(running.account.since(since).cached_tokens) >= WHOLE_CHUNKS

        # An answer that hung with the API server confirms the state of when it was asked for, soon too old again.
        wait_until("both pods reuse again", reused)

        rolls = _rolls(kubectl)
        raise_generation(kubectl, "acme")
        wait_until("the operator acts again", lambda: _rolls(kubectl) == rolls + 1)
        near.report(f"the operator has carried out an edit {time.monotonic() - back_at:.1f} s after the return")
    assert restarts(kubectl) == before, "a pod of the domain was restarted"
    assert not running.account.failed, running.account
    assert running.account.slowest_s < HANGS_S, running.account
    counts = [pod.restarts for pod in Operators(kubectl).pods()]
    assert sum(counts) <= 1, f"only the leader may have ended itself, once: {counts}"
    near.report(kubectl.run("-n", SYSTEM_NAMESPACE, "get", "pods"))


def test_a_stream_of_ten_minutes_ends_whole_although_the_api_server_is_away_for_six(
    kubectl: Kubectl, near: Stage, api_server_by_default: Component
) -> None:
    before = restarts(kubectl)
    engine = Victim(kubectl, DEMO_NAMESPACE, near.first.pod, "engine")
    body = {"model": MODEL, "prompt": fresh_prompt(), "max_tokens": STREAM_TOKENS, "ignore_eos": True, "temperature": 0}
    with tenants_ask(near) as running, streaming(near.first, ACME_KEY, body) as stream:
        began_at = stream.arrived[0]

        def is_ahead() -> bool:
            return stream.ended_at is None and len(stream.arrived) > TOKENS_IN_S * (time.monotonic() - began_at)

        with engine.paced(is_ahead):
            _until(began_at + BEFORE_S)
            with api_server_by_default.killed():
                away_at = time.monotonic()
                wait_until("both gates fence", lambda: of_gate(near, "kvstrata_gate_policy_fresh") == [0, 0], AWAY_S)
                fenced_at = time.monotonic()
                # Requests that the gates admitted before are answered by now.
                running.wait_for(4)
                quiet_at = time.monotonic()
                running.wait_for(4)
                _until(away_at + AWAY_S)
                away = running.account.since(away_at)
                assert stream.ended_at is None, f"the stream ended while the API server was away: {stream.problem}"
            back_at = time.monotonic()
            _serves(kubectl)
            wait_until("both gates confirm their policy", lambda: of_gate(near, "kvstrata_gate_policy_fresh") == [1, 1])

            def reused() -> bool:
                since = time.monotonic()
                running.wait_for(6)
                return min(running.account.since(since).cached_tokens) >= WHOLE_CHUNKS

            wait_until("both pods reuse again", reused)
            wait_until("the stream has ended", lambda: stream.ended_at, 2 * STREAM_S)
    lasted_s = stream.arrived[-1] - began_at
    near.report(
        f"a stream of {lasted_s:.0f} s and {len(stream.arrived)} tokens; the API server was away from second "
        f"{away_at - began_at:.0f} to {back_at - began_at:.0f}, gates fenced at {fenced_at - began_at:.0f}: {away}"
    )
    assert stream.done, stream.problem
    assert not stream.problem
    assert lasted_s >= STREAM_S, "the stream was too short to show anything"
    assert min(away.until(away_at + BEFORE_S).cached_tokens) >= WHOLE_CHUNKS, "hits ended long before staleAfter"
    assert set(away.since(quiet_at).cached_tokens) == {0}, "a fenced gate reused"
    assert not running.account.failed, running.account
    assert restarts(kubectl) == before, "a pod of the domain was restarted"


def _until(moment: float) -> None:
    """Wait for a monotonic second: the length of an outage is the claim."""
    time.sleep(max(0.0, moment - time.monotonic()))


def _rolls(kubectl: Kubectl) -> int:
    return int(kubectl.get("tenantcachepolicy", "acme", DEMO_NAMESPACE)["status"]["scope"]["rolls"])


def _serves(kubectl: Kubectl) -> None:
    def ready() -> bool:
        try:
            return kubectl.run("get", "--raw", "/readyz", timeout_s=5) == "ok"
        except CommandError:
            return False

    wait_until("the API server serves", ready)

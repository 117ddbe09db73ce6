"""The API server away for longer than staleAfter: requests are answered without reuse, which returns with it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from e2e.cluster.component import Component
from e2e.cluster.settings import Paths
from e2e.product.calls import Hits
from e2e.product.chapters import WHOLE_CHUNKS, Stage
from e2e.product.direct_operator import Operators
from e2e.product.direct_stage import domain_rules, of_gate, restarts, tenants_ask
from e2e.product.install import DEMO_NAMESPACE, SYSTEM_NAMESPACE, unsettled
from e2e.product.kubectl import CommandError, Kubectl, wait_until

pytestmark = pytest.mark.cluster

STALE_AFTER_S = 10
RETURNS_WITHIN_S = 40.0
"""From an API server that serves again to gates that confirm their policy; they retry at most every 30 seconds."""
OPERATOR_RETURNS_WITHIN_S = 60.0
HANGS_S = 15.0
"""A request that waited for the API server would take as long as it is away, or a time-out."""


@pytest.fixture
def api_server(kubectl: Kubectl) -> Iterator[Component]:
    """The cluster's API server; it runs again afterwards, and everything is settled."""
    Operators(kubectl).fresh()
    with domain_rules(kubectl, {"staleAfter": f"{STALE_AFTER_S}s"}):
        yield Component(Paths().node / "control-plane", "kube-apiserver")
        _serves(kubectl)
        Operators(kubectl).acting()
    wait_until("everything is ready and enforced", lambda: not unsettled(kubectl), 120)


@pytest.mark.parametrize("fault", [Component.paused, Component.killed], ids=["hangs", "is gone"])
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
            away_at = time.monotonic()
            wait_until("both gates fence", lambda: of_gate(near, "kvstrata_gate_policy_fresh") == [0, 0], 60)
            fenced_at = time.monotonic()
            # Requests that the gates admitted before are answered by now.
            running.wait_for(4)
            quiet_at = time.monotonic()
            counted = [where.hits() for where in (near.first, near.second)]
            running.wait_for(8)
            found = [where.hits() - had for where, had in zip((near.first, near.second), counted, strict=True)]
        back_at = time.monotonic()
        account = running.account
        early, fenced = account.since(away_at).until(away_at + 0.5 * STALE_AFTER_S), account.since(quiet_at)
        near.report(f"fenced {fenced_at - away_at:.1f} s after the API server went; meanwhile {account.since(away_at)}")
        assert early.cached_tokens, "no request was made"
        assert min(early.cached_tokens) >= WHOLE_CHUNKS, f"hits ended before staleAfter: {early.cached_tokens}"
        assert fenced_at - away_at < 1.5 * STALE_AFTER_S, "the gates fence too late"
        assert set(fenced.cached_tokens) == {0}, f"a fenced gate reused: {fenced.cached_tokens}"
        assert found == [Hits(0, 0), Hits(0, 0)], f"engines found {found} behind fenced gates"

        _serves(kubectl)
        wait_until(
            "both gates confirm their policy",
            lambda: of_gate(near, "kvstrata_gate_policy_fresh") == [1, 1],
            RETURNS_WITHIN_S,
        )
        near.report(f"gates confirm their policy {time.monotonic() - back_at:.1f} s after the API server's return")

        def reused() -> bool:
            since = time.monotonic()
            running.wait_for(6)
            return min(running.account.since(since).cached_tokens) >= WHOLE_CHUNKS

        # An answer that hung with the API server confirms the state of when it was asked for, soon too old again.
        wait_until("both pods reuse again", reused, RETURNS_WITHIN_S)

        rolls = _rolls(kubectl)
        patch = json.dumps({"spec": {"cacheGeneration": int(time.time())}})
        kubectl.run("-n", DEMO_NAMESPACE, "patch", "tenantcachepolicy", "acme", "--type", "merge", "-p", patch)
        wait_until("the operator acts again", lambda: _rolls(kubectl) == rolls + 1, OPERATOR_RETURNS_WITHIN_S)
        near.report(f"the operator has carried out an edit {time.monotonic() - back_at:.1f} s after the return")
    assert restarts(kubectl) == before, "a pod of the domain was restarted"
    assert not running.account.failed, running.account
    assert running.account.slowest_s < HANGS_S, running.account
    counts = [pod.restarts for pod in Operators(kubectl).pods()]
    assert sum(counts) <= 1, f"only the leader may have ended itself, once: {counts}"
    near.report(kubectl.run("-n", SYSTEM_NAMESPACE, "get", "pods"))


def _rolls(kubectl: Kubectl) -> int:
    return int(kubectl.get("tenantcachepolicy", "acme", DEMO_NAMESPACE)["status"]["scope"]["rolls"])


def _serves(kubectl: Kubectl) -> None:
    def ready() -> bool:
        try:
            return kubectl.run("get", "--raw", "/readyz", timeout_s=5) == "ok"
        except CommandError:
            return False

    wait_until("the API server serves", ready, 60)

"""A gate that is cut off while a tenant is invalidated: Complete only after it is fenced, never before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import pytest

from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, Stage
from e2e.product.direct import DirectReplica, pods_run_here
from e2e.product.direct_stage import domain_rules, open_direct_stage
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.isolate import cut_off_the_api_server, cut_off_the_operator
from e2e.product.kubectl import Kubectl, fresh_name, wait_until
from e2e.product.prompts import WHOLE_CHUNKS, fresh_prompt
from e2e.product.traffic import Caller, traffic
from e2e.product.watches import Seen, Watch, watch

pytestmark = pytest.mark.cluster

STALE_AFTER_S = 15
FENCED_WITHIN_S = STALE_AFTER_S
"""From the last reading of its policy to the last request that begins on it."""

NO_LONGER_S = 60
"""From then to the end of the invalidation, on a busy machine."""


@pytest.fixture(scope="module")
def pods(kubectl: Kubectl) -> Iterator[Stage]:
    """Two replicas, reached without the API server, whose policy goes stale soon."""
    if not pods_run_here():
        pytest.skip("cuts pods off inside their own networks: only the local cluster's can be entered")
    wait_until("everything is at rest", lambda: not unsettled(kubectl))
    with open_direct_stage(kubectl, print) as stage:
        with domain_rules(kubectl, {"staleAfter": f"{STALE_AFTER_S}s"}):
            yield stage
        wait_until("everything is ready and enforced", lambda: not unsettled(kubectl))


@pytest.mark.claim("a gate that is cut off delays an invalidation until it has fenced itself, and no longer")
def test_an_invalidation_is_complete_only_after_a_gate_without_the_api_server_has_fenced_itself(
    pods: Stage, kubectl: Kubectl
) -> None:
    lost, kept = pods.first, pods.second
    assert isinstance(lost, DirectReplica)
    prompts = _cached_everywhere(pods)
    with ExitStack() as stack:
        running = stack.enter_context(traffic(*_callers(pods)))
        with cut_off_the_api_server(kubectl, DEMO_NAMESPACE, lost.pod):
            name, story = _invalidate_acme(kubectl, stack)
            # It still has the policy that it read last, and may use it: that is why nothing may be called complete.
            found, fresh = lost.found(ACME_KEY, prompts["acme"]), lost.gate_metric("kvstrata_gate_policy_fresh")
            assert found >= WHOLE_CHUNKS or not fresh
            print(f"the cut-off gate finds {found} tokens of acme's; afterwards its policy is fresh: {fresh == 1}")
            story.wait_for("it waits for that pod", lambda o: _waits_for(o, lost.pod))
            story.wait_for(
                "its message names the pod", lambda o: lost.pod in (o.get("status") or {}).get("message", "")
            )

            done = story.wait_for("it is complete", _is_complete)
            assert lost.gate_metric("kvstrata_gate_policy_fresh") == 0
            for where in (lost, kept):
                assert where.found(ACME_KEY, prompts["acme"]) == 0, f"acme finds invalidated blocks on {where.pod}"
            _came_after_the_fence(story, done, lost.pod)
            # Fenced, it answers every tenant without reuse; the other pod is as ever.
            assert lost.found(GLOBEX_KEY, prompts["globex"]) == 0
            assert kept.found(GLOBEX_KEY, prompts["globex"]) >= WHOLE_CHUNKS

        wait_until("it reads its policy again", lambda: lost.gate_metric("kvstrata_gate_policy_fresh") == 1)
        wait_until("its acknowledgements count again", lambda: not unsettled(kubectl))
        # Reuse is back in the new epoch; blocks of the old one stay out of reach.
        assert lost.found(GLOBEX_KEY, prompts["globex"]) >= WHOLE_CHUNKS
        later = fresh_prompt()
        assert lost.found(ACME_KEY, later) == 0
        assert lost.found(ACME_KEY, later) >= WHOLE_CHUNKS
        account = running.account
    assert account.served
    assert not account.failed, str(account)
    print(f"{name}: {done.object['status']['message']}; requests meanwhile: {account}")


def test_an_invalidation_is_complete_only_after_a_gate_without_the_operator_would_have_fenced_itself(
    pods: Stage, kubectl: Kubectl
) -> None:
    lost, kept = pods.first, pods.second
    prompts = _cached_everywhere(pods)
    with ExitStack() as stack:
        running = stack.enter_context(traffic(*_callers(pods)))
        with cut_off_the_operator(kubectl, DEMO_NAMESPACE, lost.pod):
            name, story = _invalidate_acme(kubectl, stack)
            story.wait_for("it waits for that pod", lambda o: _waits_for(o, lost.pod))
            done = story.wait_for("it is complete", _is_complete)
            # Each is asked for another prompt: it may store in the new epoch, where the other would then find it.
            for where, prompt in ((lost, prompts["acme"]), (kept, prompts["acme, too"])):
                assert where.found(ACME_KEY, prompt) == 0, f"acme finds invalidated blocks on {where.pod}"
            _came_after_the_fence(story, done, lost.pod)
            # The gate itself was never cut off: it follows its policy, and globex finds its own as ever.
            assert lost.found(GLOBEX_KEY, prompts["globex"]) >= WHOLE_CHUNKS
        wait_until("the pod is in contact again", lambda: not unsettled(kubectl))
        account = running.account
    assert account.served
    assert not account.failed, str(account)
    print(f"{name}: {done.object['status']['message']}; requests meanwhile: {account}")


def _cached_everywhere(pods: Stage) -> dict[str, str]:
    """Return two prompts of acme and one of globex, each of which is found on both replicas."""
    keys = {"acme": ACME_KEY, "acme, too": ACME_KEY, "globex": GLOBEX_KEY}
    prompts = {name: fresh_prompt() for name in keys}
    for name, key in keys.items():
        for where in (pods.first, pods.second):
            where.found(key, prompts[name])
            assert where.found(key, prompts[name]) >= WHOLE_CHUNKS
    return prompts


def _callers(pods: Stage) -> list[Caller]:
    """Return callers whose prompts are too short to be cached: they only ask to be answered."""
    keys = {"acme": ACME_KEY, "globex": GLOBEX_KEY}
    replicas = (pods.first, pods.second)
    return [Caller(where, tenant, key, lambda: "hello") for tenant, key in keys.items() for where in replicas]


def _invalidate_acme(kubectl: Kubectl, stack: ExitStack) -> tuple[str, Watch]:
    """Create an invalidation of acme; it is deleted in the end. Returns its name and a watch on it."""
    name = fresh_name("cut-off")
    spec = {"scope": {"tenant": "acme"}, "mode": "Lazy", "reason": "a gate is cut off"}
    kubectl.apply(
        {
            "apiVersion": "kvstrata.io/v1alpha1",
            "kind": "CacheInvalidation",
            "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
            "spec": spec,
        }
    )
    stack.callback(kubectl.run, "-n", DEMO_NAMESPACE, "delete", "cacheinvalidation", name, "--wait=false")
    return name, stack.enter_context(watch(kubectl, "cacheinvalidation", DEMO_NAMESPACE, name))


def _waits_for(invalidation: dict[str, Any], pod: str) -> bool:
    """Whether it waits for this pod. On a busy machine the other's word may come as late as this one's end."""
    status = invalidation.get("status") or {}
    return status.get("phase") == "AwaitingAcks" and any(
        witness["pod"] == pod for witness in status.get("awaiting") or ()
    )


def _is_complete(invalidation: dict[str, Any]) -> bool:
    return (invalidation.get("status") or {}).get("phase") in ("Complete", "Failed")


def _came_after_the_fence(story: Watch, done: Seen, pod: str) -> None:
    """It became complete when the pod had fenced itself off by the rules that it knew, and counts it as fenced."""
    status = done.object["status"]
    assert status["phase"] == "Complete", json.dumps(status)
    assert status["pods"] == {"acked": 1, "live": 2, "fenced": 1}
    assert "1 could not be reached and have fenced themselves off" in status["message"]
    awaited = [
        (seen, witness)
        for seen in story.history
        for witness in (seen.object.get("status") or {}).get("awaiting") or ()
        if witness["pod"] == pod
    ]
    assert awaited
    fenced_by = datetime.fromisoformat(awaited[-1][1]["fencedBy"])
    rolled = datetime.fromisoformat(status["rolledTime"])
    assert (fenced_by - rolled).total_seconds() >= FENCED_WITHIN_S
    late_s = (datetime.fromisoformat(status["completionTime"]) - fenced_by).total_seconds()
    assert 0 <= late_s < NO_LONGER_S
    # No status called it invalid before: neither its phase nor a condition.
    for seen in story.history:
        conditions = {c["type"]: c["status"] for c in (seen.object.get("status") or {}).get("conditions") or ()}
        if seen.at < done.at:
            assert conditions.get("LogicallyInvalid") != "True"
            assert conditions.get("Complete") != "True"

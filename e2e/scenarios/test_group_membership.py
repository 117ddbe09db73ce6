"""Members of a TenantGroup share; one that is removed no longer does, from the moment that status reports it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from e2e.product.chapters import ACME_KEY, MODEL, SPARE, Stage
from e2e.product.faults import Victim
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import (
    PROMPT_TOKENS,
    WATER_TOKEN,
    WHOLE_CHUNKS,
    beginning,
    finds,
    fresh_prompt,
    shared,
    stored,
)
from e2e.product.shared_tier import make_room
from e2e.product.streams import streaming
from e2e.product.traffic import Account, Caller, traffic
from e2e.product.watches import watch

pytestmark = pytest.mark.cluster

GROUP = "research"
ROOM = "300Mi"
"""The group's limit for these tests: at its own it would evict blocks that they look for again."""
VISION_KEY = "vision-demo-key"
SPEECH_KEY = "speech-demo-key"
DRAIN_TIMEOUT_S = 2
STREAM_TOKENS = 400
STREAM_SEQUENCES = 8
"""Together more than the engine computes while the request is begun."""

ONE_TOKEN = {str(WATER_TOKEN): 100}
"""A bias so strong that every token of a completion is the same, so that its text is known before it comes."""

STEP_TOKENS = 200
"""Tokens that an engine may compute for a request on a busy machine before it learns that its caller is gone: half of
the requested ones."""


@pytest.fixture(scope="module", autouse=True)
def room(stage: Stage) -> None:
    """A shared tier with room for the blocks of these tests."""
    make_room(stage)


@pytest.fixture
def short_drain(kubectl: Kubectl) -> Iterator[None]:
    """A domain in which requests on removed keyspaces have two seconds to end."""
    before = kubectl.get("cachedomain", "default", DEMO_NAMESPACE)["spec"].get("drainTimeout")
    _patch(kubectl, "cachedomain", "default", {"drainTimeout": f"{DRAIN_TIMEOUT_S}s"})
    _settle(kubectl)
    yield
    _patch(kubectl, "cachedomain", "default", {"drainTimeout": before})
    _settle(kubectl)


@pytest.fixture
def group(kubectl: Kubectl) -> Iterator[list[str]]:
    """The members of the group, which has room; restored in the end."""
    before = kubectl.get("tenantgroup", GROUP, DEMO_NAMESPACE)["spec"]
    _patch(kubectl, "tenantgroup", GROUP, {"budgets": [{**before["budgets"][0], "limit": ROOM}]})
    _settle(kubectl)
    yield list(before["members"])
    _patch(kubectl, "tenantgroup", GROUP, {"members": before["members"], "budgets": before["budgets"]})
    _settle(kubectl)


@pytest.mark.claim("a member that is removed shares nothing from the moment that status reports it, in flight included")
@pytest.mark.usefixtures("short_drain")
def test_a_member_that_is_removed_shares_no_longer_from_the_moment_that_status_says_so(
    near: Stage, kubectl: Kubectl, group: list[str]
) -> None:
    assert {"vision", "speech"} <= set(group)
    prompts = _shared(near, VISION_KEY, SPEECH_KEY)

    with ExitStack() as stack:
        running = stack.enter_context(traffic(*_callers(near), pause_s=0.5))
        policies = stack.enter_context(watch(kubectl, "tenantcachepolicy", DEMO_NAMESPACE, "vision"))
        groups = stack.enter_context(watch(kubectl, "tenantgroup", DEMO_NAMESPACE, GROUP))
        long_prompt = fresh_prompt()
        body = {
            "model": MODEL,
            "prompt": long_prompt,
            "max_tokens": STREAM_TOKENS,
            "n": STREAM_SEQUENCES,
            "ignore_eos": True,
            "logit_bias": ONE_TOKEN,
        }
        stream = stack.enter_context(streaming(near.first, VISION_KEY, body))

        # An engine that makes no tokens keeps the request in flight, however fast it is and however slow the machine.
        with Victim(kubectl, DEMO_NAMESPACE, near.first.pod, "engine").frozen():
            removed_at = time.monotonic()
            _patch(kubectl, "tenantgroup", GROUP, {"members": [name for name in group if name != "vision"]})
            alone = policies.wait_for("vision is enforced on its own", _is_enforced_alone, removed_at)

        # The request in flight had its time to drain, and the gate ended it before status reported Enforced.
        assert alone.at - removed_at >= DRAIN_TIMEOUT_S, (
            "status reported Enforced while a request on the group's keyspace ran"
        )
        wait_until("the end of the stream has reached its caller", lambda: stream.ended_at)
        assert not stream.done
        assert "policy changed" in stream.problem
        streamed = stream.tokens

        # It finds no block of the group on either replica, and no member of the group reads its blocks.
        for where, prompt in zip((near.first, near.second), prompts, strict=True):
            assert where.found(VISION_KEY, prompt) == 0, f"vision still finds the group's on {where.pod}"
        for where, prompt in zip((near.first, near.second), _shared(near, VISION_KEY, VISION_KEY), strict=True):
            assert where.found(SPEECH_KEY, prompt) == 0, f"speech finds vision's blocks on {where.pod}"
        whole = beginning(long_prompt + " water" * STREAM_TOKENS, PROMPT_TOKENS + STREAM_TOKENS - 8)
        known = near.first.found(SPEECH_KEY, whole)
        assert known >= WHOLE_CHUNKS, (
            f"the group reads {known} tokens of the request in flight, whose prompt it stored as a member"
        )
        assert known <= PROMPT_TOKENS + streamed + STEP_TOKENS < PROMPT_TOKENS + STREAM_TOKENS, (
            f"{known} tokens of a request that ended after {PROMPT_TOKENS} + {streamed} are readable by the group"
        )

        # The remaining member keeps its hits, and the group reports that it is enforced without the other.
        for prompt in prompts:
            for where in (near.first, near.second):
                assert where.found(SPEECH_KEY, prompt) >= WHOLE_CHUNKS, f"speech lost the group's on {where.pod}"
        groups.wait_for("the group is enforced", _is_enforced, removed_at)
        account = running.account

    _all_answered(account, cut_off_before=alone.at)
    print(
        f"removed to enforced alone: {alone.at - removed_at:.2f} s (drainTimeout {DRAIN_TIMEOUT_S} s); the stream was "
        f"aborted after {streamed} tokens; the group reads {known} tokens of it; requests meanwhile: {account}"
    )


def test_a_member_that_returns_finds_what_the_group_kept(stage: Stage, kubectl: Kubectl, group: list[str]) -> None:
    prompts = _shared(stage, SPEECH_KEY, SPEECH_KEY)
    kept = stored(stage.first, SPEECH_KEY, SPARE)
    with watch(kubectl, "tenantcachepolicy", DEMO_NAMESPACE, "vision") as policies:
        began = time.monotonic()
        _patch(kubectl, "tenantgroup", GROUP, {"members": [name for name in group if name != "vision"]})
        alone = policies.wait_for("vision is alone", _is_enforced_alone, began)
        former = alone.object["status"]["formerScopes"]
        assert [(scope["kind"], scope["name"]) for scope in former] == [("Group", GROUP)]
        for where, prompt in zip((stage.first, stage.second), prompts, strict=True):
            assert where.found(VISION_KEY, prompt) == 0, f"vision still finds the group's on {where.pod}"
        began = time.monotonic()
        _patch(kubectl, "tenantgroup", GROUP, {"members": group})
        policies.wait_for("vision is back", _is_enforced_in_the_group, began)
    for where in (stage.first, stage.second):
        finds(where, VISION_KEY, kept)


def _callers(stage: Stage) -> list[Caller]:
    keys = {"acme": ACME_KEY, "vision": VISION_KEY, "speech": SPEECH_KEY}
    replicas = (stage.first, stage.second)
    return [Caller(where, tenant, key, _short) for tenant, key in keys.items() for where in replicas]


def _short() -> str:
    """Return a prompt of less than a chunk: it is answered, and nothing of it is stored."""
    return fresh_prompt(20)


def _shared(stage: Stage, writer: str, reader: str) -> list[str]:
    """Return a prompt for each replica that `writer` asked the first for, and that `reader` found on the second."""
    return shared(stage.first, stage.second, writer, 2, reader)


def _all_answered(account: Account, cut_off_before: float = 0.0) -> None:
    """See that every request was answered, but for those that the removed member had no time to drain."""
    assert account.served
    lost = [
        one
        for one in account.failed
        if not (one.tenant == "vision" and one.began_at < cut_off_before and "policy changed" in one.problem)
    ]
    assert not lost, str(account)


def _is_enforced_alone(policy: dict[str, Any]) -> bool:
    status = policy.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scope = status.get("scope") or {}
    stalled = conditions.get("Stalled") or {}
    return (
        (scope.get("kind"), scope.get("name")) == ("Tenant", "vision")
        and (stalled.get("status"), stalled.get("reason")) == ("True", "NotAMember")
        and (conditions.get("Enforced") or {}).get("status") == "True"
    )


def _is_enforced_in_the_group(policy: dict[str, Any]) -> bool:
    return (policy["status"].get("scope") or {}).get("kind") == "Group" and _is_enforced(policy)


def _is_enforced(item: dict[str, Any]) -> bool:
    status = item.get("status") or {}
    enforced = any(c["type"] == "Enforced" and c["status"] == "True" for c in status.get("conditions") or ())
    return enforced and status.get("enforcedGeneration") == item["metadata"]["generation"]


def _settle(kubectl: Kubectl) -> None:
    wait_until("everything is ready and enforced", lambda: not unsettled(kubectl))


def _patch(kubectl: Kubectl, kind: str, name: str, spec: dict[str, Any]) -> None:
    kubectl.run("-n", DEMO_NAMESPACE, "patch", kind, name, "--type", "merge", "-p", json.dumps({"spec": spec}))

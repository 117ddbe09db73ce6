"""Edits of Redis tiers, and tiers that go and come: pods follow, no process restarts, and blocks in memory stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.product.chapters import ACME_KEY, MODEL, SPARE, Stage, keyspace_of
from e2e.product.direct import container_pid
from e2e.product.faults import lives
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import CHUNK_TOKENS, WHOLE_CHUNKS, finds, fresh_prompt, stored
from e2e.product.shared_tier import TIER
from e2e.product.tier_contents import tier_contents

pytestmark = pytest.mark.cluster

PODS = f"kvstrata.io/model={MODEL}"
CONTAINERS = ("engine", "cache", "gate")
CHUNKS = WHOLE_CHUNKS // CHUNK_TOKENS
SETTLED_WITHIN_S = 600
"""A managed tier's servers are replaced one after the other."""

START_TIME = 22
"""Number of a process's start time in /proc/PID/stat; the state behind its name has number 3."""


@pytest.fixture
def small_tier(kubectl: Kubectl) -> Iterator[None]:
    """The demo's tier with 200Mi; it gets its own capacity back in the end."""
    own: str = kubectl.get("cachetier", TIER, DEMO_NAMESPACE)["spec"]["capacity"]
    _resize(kubectl, "200Mi")
    _at_rest(kubectl)
    yield
    _resize(kubectl, own)
    _at_rest(kubectl)


@pytest.mark.usefixtures("small_tier")
def test_a_larger_tier_restarts_no_engine_and_costs_no_block_in_memory(near: Stage, kubectl: Kubectl) -> None:
    (prompt,) = stored(near.first, ACME_KEY)
    pods, started = _lives(kubectl), _started(kubectl)
    template = kubectl.get("deployment", f"kvs-{MODEL}", DEMO_NAMESPACE)["spec"]["template"]

    _resize(kubectl, "300Mi")
    wait_until("every pod divides 300Mi", lambda: _is_divided(kubectl))
    assert near.first.found(ACME_KEY, prompt) >= WHOLE_CHUNKS

    _at_rest(kubectl)
    assert kubectl.get("deployment", f"kvs-{MODEL}", DEMO_NAMESPACE)["spec"]["template"] == template
    assert (_lives(kubectl), _started(kubectl)) == (pods, started)


def test_a_tier_that_goes_and_comes_restarts_nothing_and_serves_again(near: Stage, kubectl: Kubectl) -> None:
    prompts, keyspace = [fresh_prompt() for _ in range(SPARE)], keyspace_of(kubectl, "acme")
    with tier_contents(kubectl) as tier:
        before = tier.names(keyspace)
        for prompt in prompts:
            near.first.ask(ACME_KEY, prompt)
        # A write that is late is given up.
        wait_until("chunks are stored", lambda: len(tier.names(keyspace) - before) > (SPARE - 1) * CHUNKS)
    own: list[dict[str, str]] = kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)["spec"]["tiers"]
    pods, started = _lives(kubectl), _started(kubectl)
    template = kubectl.get("deployment", f"kvs-{MODEL}", DEMO_NAMESPACE)["spec"]["template"]
    try:
        _list_tiers(kubectl, [one for one in own if one["name"] != TIER])
        wait_until("every pod has left the tier", lambda: _is_enforced(kubectl))
        assert near.first.found(ACME_KEY, prompts[0]) >= WHOLE_CHUNKS, "memory stayed"
    finally:
        _list_tiers(kubectl, own)
    wait_until("every pod has joined the tier", lambda: _is_enforced(kubectl))
    _at_rest(kubectl)
    # The tier kept its blocks, and the other pod finds them.
    finds(near.second, ACME_KEY, prompts)
    assert kubectl.get("deployment", f"kvs-{MODEL}", DEMO_NAMESPACE)["spec"]["template"] == template
    assert (_lives(kubectl), _started(kubectl)) == (pods, started)


def _at_rest(kubectl: Kubectl) -> None:
    wait_until("everything is at rest", lambda: not unsettled(kubectl), SETTLED_WITHIN_S, every_s=1)


def _resize(kubectl: Kubectl, capacity: str) -> None:
    patch = json.dumps({"spec": {"capacity": capacity}})
    kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachetier", TIER, "--type", "merge", "-p", patch)


def _list_tiers(kubectl: Kubectl, tiers: list[dict[str, str]]) -> None:
    patch = json.dumps({"spec": {"tiers": tiers}})
    kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachedmodel", MODEL, "--type", "merge", "-p", patch)


def _is_enforced(kubectl: Kubectl) -> bool:
    model = kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)
    (enforced,) = [one for one in model["status"]["conditions"] if one["type"] == "PolicyEnforced"]
    current: bool = enforced.get("observedGeneration") == model["metadata"]["generation"]
    return current and enforced["status"] == "True"


def _is_divided(kubectl: Kubectl) -> bool:
    tier = kubectl.get("cachetier", TIER, DEMO_NAMESPACE)
    (evicts,) = [one for one in tier["status"]["conditions"] if one["type"] == "EvictsWhenFull"]
    current: bool = evicts.get("observedGeneration") == tier["metadata"]["generation"]
    return current and evicts["status"] == "True"


def _lives(kubectl: Kubectl) -> object:
    return lives(kubectl.list("pod", DEMO_NAMESPACE, PODS))


def _started(kubectl: Kubectl) -> dict[tuple[str, str], str]:
    """Return when the first process of each container started, in ticks since the machine's start."""
    names = [pod["metadata"]["name"] for pod in kubectl.list("pod", DEMO_NAMESPACE, PODS)]
    return {
        (name, container): Path(f"/proc/{container_pid(kubectl, DEMO_NAMESPACE, name, container)}/stat")
        .read_text()
        .rpartition(")")[2]
        .split()[START_TIME - 3]
        for name in names
        for container in CONTAINERS
    }

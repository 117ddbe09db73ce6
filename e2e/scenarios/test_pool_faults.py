"""Faults while a pool's new content is being warmed: it is published whole, no tenant reads it before, and all answers
are as without a pool. A new pod that waits for a pool serves no request before it has the pool."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.product.calls import Replica
from e2e.product.chapters import MODEL, SPARE, Stage, wait_published
from e2e.product.direct import DirectReplica, direct_replica, pods_run_here
from e2e.product.direct_operator import OperatorPod, Operators
from e2e.product.direct_stage import open_direct_stage
from e2e.product.faults import Victim
from e2e.product.faults_traffic import wait_until_well
from e2e.product.guest import guest, guests
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import CommandError, Kubectl, wait_until
from e2e.product.pools import PREFIX_CHUNKS, counts, fresh_prefixes, held, pool, pool_keyspaces, pool_of
from e2e.product.probes import ANSWER_TOKENS, LITTLE_OF_THEIR_OWN, probing, with_question
from e2e.product.prompts import CHUNK_TOKENS, fresh_prompt
from e2e.product.shared_tier import SERVER, TIER, empty
from e2e.product.tier_contents import tier_contents

pytestmark = pytest.mark.cluster

POOL = "battered"
MEMORY = "cpu"
PREFIXES = 4
CHUNKS = PREFIX_CHUNKS
SHARED_TOKENS = CHUNKS * CHUNK_TOKENS
WHOLE = PREFIXES * CHUNKS
READERS = [f"reader-{number:02}" for number in range(12)]
LATECOMER = "latecomer"
FIELDS = {"readers": {"public": True}, "invalidation": "Lazy", "warmup": {"maxConcurrent": 2}}


@pytest.fixture
def stages(kubectl: Kubectl) -> Callable[[], AbstractContextManager[Stage]]:
    """Opens two ready replicas as they are at that time: faults replace processes and pods."""
    if not pods_run_here():
        pytest.skip("the parts of another cluster than the local one cannot be killed and frozen from here")
    return lambda: open_direct_stage(kubectl, print)


@pytest.fixture
def stage(stages: Callable[[], AbstractContextManager[Stage]]) -> Iterator[Stage]:
    with stages() as opened:
        yield opened


@pytest.fixture(scope="module")
def keys(near: Stage) -> Iterator[dict[str, str]]:
    """The readers' API keys."""
    empty(near)
    with guests(near, [*READERS, LATECOMER], {"pools": [{"name": POOL}], "budgets": LITTLE_OF_THEIR_OWN}) as known:
        yield known


@pytest.fixture(scope="module")
def stranger(near: Stage) -> Iterator[str]:
    """The API key of a tenant whose policy names no pool."""
    with guest(near, "stranger", {"budgets": LITTLE_OF_THEIR_OWN}) as key:
        yield key


@dataclass(slots=True)
class Content:
    """The readers' present prefixes, and the answers to a tenant that asks for them without a pool."""

    prefixes: list[str]
    answers: dict[str, str]


@pytest.fixture(scope="module")
def content(near: Stage, stranger: str) -> Iterator[Content]:
    """A pool that is published; each test gives it other content."""
    prefixes = fresh_prefixes(PREFIXES)
    answers = answers_without_a_pool(near.first, stranger, prefixes)
    with pool(near, POOL, prefixes, **FIELDS):
        yield Content(prefixes, answers)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that strikes once the warming pod has some share of the chunks. Meanwhile the serving pods are asked.

    The pod whose name comes first computes chunks that shared tiers lack, if it is able to.
    """

    strike: Callable[[Stage], None]
    share: float
    serves: Callable[[Stage], Sequence[Replica]]


def _kills(container: str) -> Callable[[Stage], None]:
    return lambda stage: Victim(stage.kubectl, DEMO_NAMESPACE, stage.first.pod, container).send(signal.SIGKILL)


def _kills_redis(stage: Stage) -> None:
    Victim(stage.kubectl, DEMO_NAMESPACE, SERVER, "redis").send(signal.SIGKILL)


def _kills_the_leader(stage: Stage) -> None:
    operators = Operators(stage.kubectl)
    leader: OperatorPod = wait_until(
        "an operator leads", lambda: next((pod for pod in operators.pods() if pod.leads), None), every_s=0.01
    )
    leader.kill()


def _both(stage: Stage) -> Sequence[Replica]:
    return stage.first, stage.second


def _the_other(stage: Stage) -> Sequence[Replica]:
    return (stage.second,)


FAULTS = {
    "the operator, early": Fault(_kills_the_leader, 0.0, _both),
    "the gate that warms": Fault(_kills("gate"), 0.3, _the_other),
    "the cache server, early": Fault(_kills("cache"), 1 / WHOLE, _both),
    "Redis, halfway": Fault(_kills_redis, 0.5, _both),
    "the engine that warms": Fault(_kills("engine"), 0.3, _the_other),
}


TRIALS = 5
"""A fault may come too late on a busy machine, when the content is published already."""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_content_is_published_whole_and_read_by_nobody_before_although_there_ends(
    fault: Fault,
    stages: Callable[[], AbstractContextManager[Stage]],
    keys: dict[str, str],
    stranger: str,
    content: Content,
) -> None:
    for _ in range(TRIALS):
        with stages() as stage:
            if _strikes_in_time(fault, stage, keys, stranger, content):
                return
    pytest.fail(f"the fault came too late {TRIALS} times")


def _strikes_in_time(fault: Fault, stage: Stage, keys: dict[str, str], stranger: str, content: Content) -> bool:
    """Give the pool other content, and assert all that must hold at any time of the fault; return whether it came
    before the content was published, and readers asked in between."""
    kubectl = stage.kubectl
    old, new = content.prefixes, fresh_prefixes(PREFIXES)
    expected = content.answers | answers_without_a_pool(stage.second, stranger, new)
    (old_keyspace,) = pool_keyspaces(kubectl, POOL)
    before = kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)["status"]["contentDigest"]
    # The last read that showed the content unpublished was sent then: so it was not published before.
    unpublished_at = 0.0

    def published() -> bool:
        nonlocal unpublished_at
        asked_at = time.monotonic()
        if _is_published(kubectl.get("prefixpool", POOL, DEMO_NAMESPACE), before):
            return True
        unpublished_at = asked_at
        return False

    with probing(fault.serves(stage), {name: keys[name] for name in READERS}, old, pause_s=0.5) as probes:
        probes.wait_for(2)
        kubectl.apply(pool_of(POOL, new, **FIELDS))
        probes.ask_for(new)
        keyspace = wait_until("pods know the content", lambda: _another(kubectl, old_keyspace), every_s=0)
        wait_until("so much is warm", lambda: _warm_chunks(stage.first, keyspace) >= fault.share * WHOLE, every_s=0)
        chunks = _warm_chunks(stage.first, keyspace)
        fault.strike(stage)
        struck_at, left = time.monotonic(), _warm_chunks(stage.first, keyspace)
        wait_until("published", published, every_s=0.05)
        status = wait_published(kubectl, POOL)
        probes.wait_for(4)
    content.prefixes, content.answers = new, {prefix: expected[prefix] for prefix in new}
    stage.report(
        f"{chunks} of {WHOLE} chunks were warm; published {unpublished_at - struck_at:.1f} s after or later; "
        f"{len(probes.done)} requests"
    )
    assert not probes.failed
    assert [(one, expected[one.prefix]) for one in probes.done if one.text != expected[one.prefix]] == []
    early = probes.fresh(new, until=unpublished_at)
    assert {one.cached_tokens for one in early} <= {0}, early
    if chunks == WHOLE or left == WHOLE or unpublished_at < struck_at:
        # Redis, too, may have lost stored and published blocks.
        wait_until_well(kubectl)
        return False
    # Status reports the pool's true contents, and a new reader finds all of a prefix, unless its lookup is late.
    assert status["chunks"] == WHOLE
    assert {row["name"]: (row["stored"], row["expected"]) for row in status["tiers"]} == {
        MEMORY: (WHOLE, WHOLE),
        TIER: (WHOLE, WHOLE),
    }
    with tier_contents(kubectl) as tier:
        stored = tier.blocks(keyspace)
    assert len(stored) == WHOLE
    assert pool_keyspaces(kubectl, POOL) == [keyspace]
    assert SHARED_TOKENS in (stage.second.found(keys[LATECOMER], with_question(prefix)) for prefix in new)
    wait_until_well(kubectl)
    return bool(early)


def test_a_new_pod_that_a_pool_holds_up_is_ready_when_its_own_memory_has_the_pool(
    stage: Stage, kubectl: Kubectl, keys: dict[str, str], content: Content
) -> None:
    kubectl.apply(pool_of(POOL, content.prefixes, **{**FIELDS, "warmup": {"beforeReady": True}}))
    wait_published(kubectl, POOL)
    (keyspace,) = pool_keyspaces(kubectl, POOL)
    waiting, old = f"warming: the pool {POOL} is not in this pod's memory yet", stage.second.pod
    reasons: list[str] = []
    # A pod may have waited and become ready between two looks of a test that was held up.
    for _ in range(SPARE):
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", old)
        new = wait_until("a new pod runs", lambda old=old: _new_pod(kubectl, {stage.first.pod, old}))
        reasons = _reasons_until_ready(new)
        memory = held(new, keyspace)[MEMORY]
        assert (memory.stored, memory.expected) == (WHOLE, WHOLE), reasons
        _lends_the_pool(new, keys[READERS[0]], content.prefixes)
        wait_until_well(kubectl)
        if reasons[-1:] == [waiting]:
            break
        old = new.pod
    assert reasons[-1:] == [waiting], reasons


def _reasons_until_ready(new: DirectReplica) -> list[str]:
    """Wait until a pod is ready; return the reasons that its gate gave before."""
    reasons: list[str] = []

    def is_ready() -> bool:
        try:
            why = new.not_ready()
        except OSError:
            return False  # it does not listen yet
        if why and why not in reasons[-1:]:
            reasons.append(why)
        return not why

    wait_until("it is ready", is_ready, every_s=0.01)
    return reasons


def _lends_the_pool(where: DirectReplica, key: str, prefixes: Sequence[str]) -> None:
    """See a reader find a prefix in the pod's memory, one question after the other: a lookup that is late is a miss."""
    found: list[int] = []
    loaded, lent = f"{TIER}.pool_hits", "memory.lent_blocks"
    for prefix in prefixes:
        before = counts(where)
        found.append(where.found(key, prefix + fresh_prompt(10)))
        after = counts(where)
        assert after.get(loaded, 0) == before.get(loaded, 0), "chunks were loaded from Redis"
        if found[-1] == SHARED_TOKENS:
            assert after[lent] - before.get(lent, 0) >= CHUNKS
            return
    raise AssertionError(f"{where.pod} found {found} tokens of prefixes, and never {SHARED_TOKENS}")


def answers_without_a_pool(where: Replica, stranger: str, prefixes: Sequence[str]) -> dict[str, str]:
    """Return the answers to a tenant that reads no such pool and asks for each prefix for the first time."""
    answers = {prefix: where.complete(stranger, with_question(prefix), max_tokens=ANSWER_TOKENS) for prefix in prefixes}
    assert {(one.status, one.cached_tokens) for one in answers.values()} == {(200, 0)}
    return {prefix: answer.text for prefix, answer in answers.items()}


def _another(kubectl: Kubectl, keyspace: str) -> str:
    return next((one for one in pool_keyspaces(kubectl, POOL) if one != keyspace), "")


def _warm_chunks(where: Replica, keyspace: str) -> int:
    rows = held(where, keyspace)
    return rows[MEMORY].stored if MEMORY in rows else -1


def _is_published(item: dict[str, Any], before: str) -> bool:
    """Whether readers are sent to the content that comes after one of digest `before`, or are about to be."""
    status = item["status"]
    return bool(status.get("next", {}).get("published") or status["contentDigest"] != before)


def _new_pod(kubectl: Kubectl, known: set[str]) -> DirectReplica | None:
    """Return the pod that came after the known ones as soon as its engine has been started."""
    pods = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
    for name in (pod["metadata"]["name"] for pod in pods):
        if name not in known:
            with contextlib.suppress(CommandError):
                return direct_replica(kubectl, DEMO_NAMESPACE, MODEL, name)
    return None

"""A pool whose content changes while readers ask all the time: when they lose the old, and that they get the new."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.product.chapters import Stage, wait_published
from e2e.product.guest import guests
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl
from e2e.product.pools import PREFIX_CHUNKS, fresh_prefixes, pool, pool_of
from e2e.product.probes import LITTLE_OF_THEIR_OWN, Probe, probing
from e2e.product.prompts import CHUNK_TOKENS
from e2e.product.shared_tier import empty
from e2e.product.watches import watch

pytestmark = pytest.mark.cluster

POOL = "changing"
PREFIXES = 4
CHUNKS = PREFIX_CHUNKS
SHARED_TOKENS = CHUNKS * CHUNK_TOKENS
READERS = [f"reader-{number:02}" for number in range(32)]
PUBLIC_READERS = {"readers": {"public": True}, "warmup": {"maxConcurrent": 2}}
"""Every tenant whose policy names the pool is a reader."""

ENOUGH = 1
"""Requests of each pod that a statement about a time needs."""


@pytest.fixture(scope="module")
def keys(near: Stage) -> Iterator[dict[str, str]]:
    """The readers' API keys."""
    empty(near)
    with guests(near, READERS, {"pools": [{"name": POOL}], "budgets": LITTLE_OF_THEIR_OWN}) as known:
        yield known


def test_lazy_readers_lose_no_hit_before_the_new_content_is_warm_and_published(
    near: Stage, kubectl: Kubectl, keys: dict[str, str]
) -> None:
    old, new = fresh_prefixes(PREFIXES), fresh_prefixes(PREFIXES)
    fields = {**PUBLIC_READERS, "invalidation": "Lazy"}
    with (
        pool(near, POOL, old, **fields),
        watch(kubectl, "prefixpool", DEMO_NAMESPACE, POOL) as statuses,
        probing((near.first, near.second), keys, old, pause_s=0.35) as probes,
    ):
        probes.wait_for(4)
        before = kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)["status"]
        kubectl.apply(pool_of(POOL, new, **fields))
        begun = statuses.wait_for("the new content is being made", lambda o: "next" in o["status"])
        probes.ask_for(new)
        taken_over = statuses.wait_for("it took over", lambda o: _has_other(o, before), begun.at)
        status = wait_published(kubectl, POOL)
        ready = statuses.wait_for("it is ready", _is_ready, taken_over.at)
        probes.wait_for(24)
    assert not probes.failed
    kept = probes.fresh(old, until=taken_over.at)
    assert {one.cached_tokens for one in kept} == {SHARED_TOKENS}, kept
    while_made = probes.fresh(old, since=begun.at, until=taken_over.at)
    _cover_both_pods(near, while_made)
    assert {tier["stored"] for tier in status["tiers"]} == {status["chunks"]} == {PREFIXES * CHUNKS}
    # Once status reports it, every reader has the new content and none the old.
    _cover_both_pods(near, probes.fresh(new, since=ready.at))
    assert {one.cached_tokens for one in probes.fresh(new, since=ready.at)} == {SHARED_TOKENS}
    assert {one.cached_tokens for one in probes.fresh(old, since=ready.at)} == {0}
    near.report(f"{len(while_made)} of {len(probes.done)} requests hit the old in {taken_over.at - begun.at:.1f} s")


def test_eager_readers_lose_the_old_at_once_and_none_has_it_when_status_says_that_the_new_is_in_force(
    near: Stage, kubectl: Kubectl, keys: dict[str, str]
) -> None:
    old, new = fresh_prefixes(PREFIXES), fresh_prefixes(PREFIXES)
    fields = {**PUBLIC_READERS, "invalidation": "Eager"}
    with (
        pool(near, POOL, old, **fields),
        watch(kubectl, "prefixpool", DEMO_NAMESPACE, POOL) as statuses,
        probing((near.first, near.second), keys, old, pause_s=0.35) as probes,
    ):
        probes.wait_for(8)
        before = kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)["status"]
        applied_at = time.monotonic()
        kubectl.apply(pool_of(POOL, new, **fields))
        cut_off = statuses.wait_for("the old is cut off", lambda o: _has_other(o, before))
        published = statuses.wait_for("the new is published", lambda o: o["status"].get("published"), cut_off.at)
        ready = statuses.wait_for("it is ready", _is_ready, published.at)
        probes.ask_for(new)
        probes.wait_for(24)
    assert not probes.failed
    assert {one.cached_tokens for one in probes.fresh(old, until=applied_at)} == {SHARED_TOKENS}
    # The old is gone before the new is there, does not return, and is gone in each pod.
    _cover_both_pods(near, [one for one in probes.fresh(old, until=published.at) if not one.cached_tokens])
    for where in (near.first, near.second):
        seen = [one for one in probes.fresh(old) if one.pod == where.pod]
        first_miss_at = min(one.ended_at for one in seen if not one.cached_tokens)
        assert not any(one.cached_tokens for one in seen if one.began_at >= first_miss_at), seen
    after = probes.fresh(old, since=ready.at)
    _cover_both_pods(near, after)
    assert {one.cached_tokens for one in after} == {0}
    assert {one.cached_tokens for one in probes.fresh(new)} == {SHARED_TOKENS}
    hits = [one for one in probes.fresh(old) if one.cached_tokens]
    near.report(
        f"the last hit of the old ended {hits[-1].ended_at - cut_off.at:+.1f} s from when status had other content"
    )


def _cover_both_pods(stage: Stage, probes: list[Probe]) -> None:
    for where in (stage.first, stage.second):
        assert sum(one.pod == where.pod for one in probes) >= ENOUGH, f"too few requests of {where.pod}: {probes}"


def _has_other(item: dict[str, Any], before: dict[str, Any]) -> bool:
    return bool(item["status"]["contentDigest"] != before["contentDigest"])


def _is_ready(item: dict[str, Any]) -> bool:
    ready = next(c for c in item["status"]["conditions"] if c["type"] == "Ready")
    current = ready["observedGeneration"] == item["metadata"]["generation"]
    return bool(current and ready["status"] == "True" and "next" not in item["status"])

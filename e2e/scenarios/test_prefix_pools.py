"""A declared prefix is computed once and read by its pool's readers; all that follows it stays each tenant's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.product.calls import Replica
from e2e.product.chapters import ACME_KEY, SPARE, Stage, _object, keyspace_of, wait_published
from e2e.product.guest import guests
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.pools import PREFIX_CHUNKS, PREFIX_TOKENS, fresh_prefix, fresh_prefixes, pool, pool_keyspaces, pool_of
from e2e.product.prompts import (
    CHUNK_TOKENS,
    QUESTION_TOKENS,
    STORE_SETTLES_S,
    continuation,
    finds,
    fresh_prompt,
    questions,
)
from e2e.product.shared_tier import TIER, empty, make_room
from e2e.product.tier_contents import TierContents, tier_contents

pytestmark = pytest.mark.cluster

POOL = "house-rules"
CHUNKS = PREFIX_CHUNKS
SHARED_TOKENS = CHUNKS * CHUNK_TOKENS


def question() -> str:
    """A tenant's text after the shared prefix: the chunk in which it begins is the first that differs, each time."""
    return fresh_prompt(QUESTION_TOKENS)


def hits(where: Replica, keys: dict[str, str], names: Iterator[str], text: str, end: str = "") -> str:
    """Return the first reader that finds the whole prefix with its first question here; `end` follows it.

    One with a late lookup finds less, and none finds more.
    """
    found = []
    for name in names:
        found.append((name, where.found(keys[name], text + (end or question()))))
        assert found[-1][1] <= SHARED_TOKENS, found
        if found[-1][1] == SHARED_TOKENS:
            return name
    raise AssertionError(f"{where.pod}: {found}")


def wait_stored(tier: TierContents, keyspace: str, blocks: int) -> None:
    """Wait until a keyspace has so many blocks in the tier, and see that it gets no more."""
    wait_until(f"{blocks} blocks of {keyspace}", lambda: len(tier.blocks(keyspace)) >= blocks)
    time.sleep(STORE_SETTLES_S)
    assert len(tier.blocks(keyspace)) == blocks


@contextmanager
def readers(stage: Stage, *names: str, pools: tuple[str, ...] = (POOL,)) -> Iterator[dict[str, str]]:
    """Let tenants that name pools be served while the block runs; yields their API keys."""
    with guests(stage, names, {"pools": [{"name": name} for name in pools]}) as keys:
        yield keys


def _reported(kubectl: Kubectl) -> tuple[int, int, int]:
    """The pool's chunks by its status, and how many of them are stored in the shared tier, in how many bytes."""
    status = kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)["status"]
    shared_tier = next(tier for tier in status["tiers"] if tier["name"] == TIER)
    return status["chunks"], shared_tier["stored"], shared_tier["bytes"]


def test_tenants_without_a_pool_store_the_same_prefix_once_each(near: Stage, kubectl: Kubectl) -> None:
    make_room(near)
    text = fresh_prefix()
    with readers(near, "solo-a", "solo-b", pools=()) as keys, tier_contents(kubectl) as tier:
        for key in keys.values():
            assert near.first.found(key, text + question()) == 0
        whole = (PREFIX_TOKENS + QUESTION_TOKENS) // CHUNK_TOKENS
        for name in keys:
            wait_stored(tier, keyspace_of(kubectl, name), whole)


@pytest.mark.claim("readers share one copy of the prefix, on every replica, and nothing after it")
def test_readers_share_one_copy_of_the_prefix_and_nothing_after_it(near: Stage, kubectl: Kubectl) -> None:
    make_room(near)
    text = fresh_prefix()
    names = [f"reader-{letter}" for letter in "abcdef"]
    with pool(near, POOL, text, readers={"tenants": names}), readers(near, *names) as keys:
        (keyspace,) = pool_keyspaces(kubectl, POOL)
        ends, asked, found = {name: question() for name in names}, iter(names), []
        # Each one's first question finds the prefix, unless its lookup is late.
        for where in (near.first, near.second, near.first):
            while (name := next(asked, None)) is not None:
                found.append((name, where.found(keys[name], text + ends[name])))
                if found[-1][1] == SHARED_TOKENS:
                    break
            assert found[-1][1] == SHARED_TOKENS, found
        one, other, third = (name for name, tokens in found if tokens == SHARED_TOKENS)
        # A tenant that is not a reader finds none of the same tokens, and one reader none of another's question.
        assert near.first.found(ACME_KEY, text + ends[one]) == 0
        assert SHARED_TOKENS in (near.second.found(keys[name], text + ends[other]) for name in (one, *asked))
        with tier_contents(kubectl) as tier:
            of_pool = tier.blocks(keyspace)
            assert len(of_pool) == CHUNKS
            own = (PREFIX_TOKENS + QUESTION_TOKENS) // CHUNK_TOKENS - CHUNKS
            for name in (other, third):
                wait_stored(tier, keyspace_of(kubectl, name), own)
            assert len(tier.blocks(keyspace)) == CHUNKS
        held = (CHUNKS, CHUNKS, sum(len(block.value) for block in of_pool))
        wait_until("status reports it", lambda: _reported(kubectl) == held)
        near.report(kubectl.run("-n", DEMO_NAMESPACE, "get", "prefixpool", POOL))


@pytest.mark.claim("a reader's answers by a pool are those that it would get without")
def test_what_a_reader_gets_by_a_pool_is_what_it_would_get_without(near: Stage) -> None:
    make_room(near)
    texts, found, known = fresh_prefixes(SPARE), [], []
    with pool(near, POOL, texts, readers={"tenants": ["reader-a"]}), readers(near, "reader-a") as keys:
        for text in texts:
            prompt = text + continuation(text, 8)
            by_pool, computed = (near.first.ask(key, prompt, max_tokens=16) for key in (keys["reader-a"], ACME_KEY))
            assert computed.cached_tokens == 0
            assert by_pool.text == computed.text
            found.append(by_pool.cached_tokens)
            known.append(by_pool.text == continuation(prompt, 16))
        assert SHARED_TOKENS in found, found
        assert any(known), "no answer depends on the prefix"


def test_a_reader_that_is_taken_off_the_list_reads_no_more_once_its_policy_says_so(
    near: Stage, kubectl: Kubectl
) -> None:
    make_room(near)
    text = fresh_prefix()
    # One for each pod is taken off, and asks the other pod then: an engine that it asked before has a copy of its own.
    leave, stay = ([f"reader-{letter}" for letter in letters] for letters in ("abcd", "efgh"))
    names = [*leave, *stay]
    with pool(near, POOL, text, readers={"tenants": names}), readers(near, *names) as keys:
        left, staying = iter(leave), iter(stay)
        leaving = {hits(where, keys, left, text): where for where in (near.first, near.second)}
        kubectl.apply(pool_of(POOL, text, readers={"tenants": stay}))
        for name in leaving:
            wait_until("the policy reports it", lambda name=name: _not_a_reader(kubectl, name))
        for name, where in leaving.items():
            assert _other(near, where).found(keys[name], text + question()) == 0, name
        for where in (near.first, near.second):
            hits(where, keys, staying, text)


@pytest.mark.parametrize("invalidation", ["Lazy", "Eager"])
def test_new_content_takes_the_place_of_the_old(near: Stage, kubectl: Kubectl, invalidation: str) -> None:
    make_room(near)
    old, new = fresh_prefix(), fresh_prefix()
    names = [f"reader-{letter}" for letter in "abcdefgh"]
    fields = {"readers": {"tenants": list(names)}, "invalidation": invalidation}
    with pool(near, POOL, old, **fields), readers(near, *names) as keys:
        asked = iter(names[2:])
        hits(near.first, keys, asked, old)
        before = kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)["status"]
        (gone,) = pool_keyspaces(kubectl, POOL)
        kubectl.apply(pool_of(POOL, new, **fields))
        after = wait_published(kubectl, POOL)
        assert after["contentDigest"] != before["contentDigest"]
        assert gone not in pool_keyspaces(kubectl, POOL)
        for where in (near.first, near.second):
            hits(where, keys, asked, new)
        for name, where in zip(names[:2], (near.first, near.second), strict=True):
            assert where.found(keys[name], old + question()) == 0, name


def test_a_pool_that_is_deleted_is_read_by_nobody(near: Stage, kubectl: Kubectl) -> None:
    make_room(near)
    text = fresh_prefix()
    names = [f"reader-{letter}" for letter in "abcd"]
    with readers(near, *names) as keys:
        with pool(near, POOL, text, readers={"tenants": names}):
            asked = iter(names)
            where_of = {hits(where, keys, asked, text): where for where in (near.first, near.second)}
        wait_until("the bundle has no pool", lambda: not pool_keyspaces(kubectl, POOL))
        for name in where_of:
            wait_until("it reports PoolNotFound", lambda name=name: _reason(kubectl, name) == "PoolNotFound")
            wait_until("it is enforced", lambda name=name: _enforced(kubectl, name))
        for name, where in where_of.items():
            assert _other(near, where).found(keys[name], text + question()) == 0, name


def test_members_of_a_group_that_shares_pools_only_share_the_declared_prefix_and_nothing_after_it(
    near: Stage, kubectl: Kubectl
) -> None:
    empty(near)  # a group that is new gets no room in a tier that others have filled
    members, group = [f"member-{letter}" for letter in "abcd"], "pools-only"
    spec = {"isolation": "Group", "groupRef": {"name": group}, "pools": [{"name": POOL}]}
    text, end = fresh_prefix(), question()
    try:
        kubectl.apply(_object("TenantGroup", group, {"members": members, "sharing": "PoolsOnly"}))
        with guests(near, members, spec) as keys, pool(near, POOL, text, readers={"groups": [group]}):
            asked = iter(members)
            for where in (near.first, near.second):
                hits(where, keys, asked, text, end)
                time.sleep(STORE_SETTLES_S)
            # The same question has more in common than the prefix, as members that share all find.
            kubectl.apply(_object("TenantGroup", group, {"members": members, "sharing": "Full"}))
            for name in members:
                wait_until("they share all", lambda name=name: _is_in_group(kubectl, name))
            # Until the group's data key is there too, tiers take nothing of it.
            finds(near.second, keys["member-b"], questions(near.first, keys["member-a"], text))
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantgroup", group, "--ignore-not-found")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prefixes": [{"name": "short", "text": "Be brief."}]}, "NoWholeChunk"),
        ({"modelRef": {"name": "nobody"}}, "ModelNotFound"),
        ({"tiers": [{"name": "nowhere"}]}, "TierNotFound"),
        (
            {"prefixes": [{"name": "absent", "configMapKeyRef": {"name": "nowhere", "key": "prompt"}}]},
            "SourceNotFound",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_pool_that_cannot_be_served_says_why(kubectl: Kubectl, fields: dict[str, Any], reason: str) -> None:
    name = f"wrong-{reason.lower()}"
    try:
        kubectl.apply(pool_of(name, fresh_prefix(), **{"readers": {"tenants": ["acme"]}} | fields))
        stalled = wait_until(reason, lambda: _stalled(kubectl, name))
        assert stalled["reason"] == reason, json.dumps(stalled)
        assert len(stalled["message"].split()) > 5, stalled["message"]
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "prefixpool", name, "--ignore-not-found")


def _other(stage: Stage, where: Replica) -> Replica:
    return stage.second if where is stage.first else stage.first


def _not_a_reader(kubectl: Kubectl, policy: str) -> bool:
    return _reason(kubectl, policy) == "NotAReader" and _enforced(kubectl, policy)


def _reason(kubectl: Kubectl, policy: str) -> str:
    return str(kubectl.condition("tenantcachepolicy", policy, DEMO_NAMESPACE, "PoolsResolved").get("reason"))


def _enforced(kubectl: Kubectl, policy: str) -> bool:
    return kubectl.condition("tenantcachepolicy", policy, DEMO_NAMESPACE, "Enforced").get("status") == "True"


def _is_in_group(kubectl: Kubectl, policy: str) -> bool:
    scope = (kubectl.get("tenantcachepolicy", policy, DEMO_NAMESPACE)["status"].get("scope") or {}).get("kind")
    return bool(scope == "Group" and _enforced(kubectl, policy))


def _stalled(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    found = kubectl.condition("prefixpool", name, DEMO_NAMESPACE, "Stalled")
    return found if found.get("status") == "True" else None

"""Promises of the product, shown on a running domain. The demo prints them; the scenario tests assert them.

Each chapter takes a `Stage` and fails with an AssertionError that names the broken promise. The demo prints the
chapter's docstring, in front of the lines that the chapter reports.
"""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.cluster.settings import REPOSITORY

from .attacks import ATTACKS
from .calls import ChatAnswer, Replica, replica
from .install import DEMO_NAMESPACE, unsettled
from .kubectl import Kubectl, fresh_name, pod_names, wait_until
from .prompts import (
    CHUNK_TOKENS,
    LONG_STORE_SETTLES_S,
    Chat,
    finds,
    finds_chat,
    fresh_prompt,
    newly_stored,
    shared,
    stored,
    whole_chunks,
)
from .shortest import the_shortest_objects_serve_a_tenant

MODEL = "smollm2"
ACME_KEY = "acme-demo-key"
GLOBEX_KEY = "globex-demo-key"
DOCS_KEY = "docs-demo-key"
POOL = "assistant"
DOCUMENT = REPOSITORY / "LICENSE"
DOCUMENT_CHARACTERS = 4700
QUESTION = "Which city is the capital of France?"
BEFORE_QUESTION_TOKENS = 84
"""Of the text between a shared prefix and the question: more than a chunk."""

ANSWER = "Paris"
SPARE = 3
"""Prompts of which one is to be found: a lookup that is late on a busy machine is a miss."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A running domain: its API and two replicas of the model. `report` takes lines for a person."""

    kubectl: Kubectl
    first: Replica
    second: Replica
    report: Callable[[str], None]


@contextmanager
def open_stage(kubectl: Kubectl, report: Callable[[str], None]) -> Iterator[Stage]:
    """Reach two ready pods of the demo's model."""

    def ready() -> list[str]:
        pods = kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/model={MODEL}")
        return pod_names([p for p in pods if _is_ready(p) and "deletionTimestamp" not in p["metadata"]])

    names = wait_until("two pods of the model are ready", lambda: ready()[:2] if len(ready()) >= 2 else None, 600)
    with ExitStack() as stack:
        first, second = (stack.enter_context(replica(kubectl, DEMO_NAMESPACE, MODEL, name)) for name in names)
        yield Stage(kubectl, first, second, report)


def everything_is_ready_and_enforced(stage: Stage) -> None:
    """Every object is Ready, and every pod of the model enforces every policy.

    Tenants, budgets, groups and shared prefixes are objects of the cluster; here the tenants are acme, globex and
    docs, among others. READY, with its REASON, is the state to watch. ENFORCED counts the pods that enforce the newest
    edit, of all serving pods. The command: kubectl get cache-status.
    """
    try:
        wait_until("every object is ready and enforced", lambda: not unsettled(stage.kubectl), every_s=1)
    except AssertionError as late:
        raise AssertionError("\n".join((str(late), *unsettled(stage.kubectl)))) from late
    stage.report(stage.kubectl.run("-n", DEMO_NAMESPACE, "get", "cache-status"))


def a_tenant_finds_its_blocks_on_every_replica_and_no_other_tenant_does(stage: Stage) -> None:
    """A tenant's cached blocks serve it on every replica; another tenant's identical prompt finds none.

    Each prompt is a document of about a thousand tokens and a question. "Tokens found" are prompt tokens that the
    engine took from a cache and did not compute again; seconds are those until the answer's first word. Caches keep
    whole chunks of 64 tokens. An application only sends its API key: the gate in front of each engine derives the
    tenant from it.
    """
    chat = _fresh_chat()
    computed = stage.first.chat(ACME_KEY, *chat)
    stage.report(f"acme asks replica 1 about a new text of {computed.prompt_tokens} tokens: {_summary(computed)}")
    assert computed.cached_tokens == 0, f"a prompt that no tenant has sent before found {computed.cached_tokens} tokens"
    time.sleep(LONG_STORE_SETTLES_S)
    chats = itertools.chain([chat], _asked(stage.first, ACME_KEY, _fresh_chat))
    chat, loaded = finds_chat(stage.second, ACME_KEY, chats)
    stage.report(f"acme asks replica 2 the same: {_summary(loaded)}")
    stage.report(f"the shared tier saved {computed.first_text_s - loaded.first_text_s:.1f} s until the first word")
    theirs = stage.first.chat(GLOBEX_KEY, *chat)
    stage.report(f"globex asks replica 1 the same: {_summary(theirs)}")
    assert theirs.cached_tokens == 0, f"globex found {theirs.cached_tokens} tokens of acme's blocks on replica 1"
    for answer in (computed, loaded, theirs):
        assert ANSWER in answer.text, f"the answer is wrong: {answer.text}"

    def missed_by_globex() -> Iterator[str]:
        for prompt in newly_stored(stage.first, ACME_KEY):
            found = stage.second.found(GLOBEX_KEY, prompt)
            stage.report(f"globex's copy of a second prompt of acme on replica 2: {found} tokens found")
            assert found == 0, f"globex found {found} tokens of acme's blocks on replica 2"
            yield prompt

    # Another prompt for the other replica, because globex has blocks of its own for the first; acme itself finds it.
    finds(stage.second, ACME_KEY, missed_by_globex())


def a_tenant_cannot_reach_anothers_blocks_by_force(stage: Stage) -> None:
    """A tenant that crafts its requests still finds no block of another tenant.

    globex sends acme's prompt with acme's salt, with duplicate and escaped keys, in other encodings and to other
    endpoints. Each line shows the HTTP status of the gate's answer, and the reason of a refusal. This needs no
    configuration: gates check every request.
    """
    (prompt,) = shared(stage.first, stage.second, ACME_KEY)
    salt = keyspace_of(stage.kubectl, "acme")
    found = 0
    for attack in ATTACKS:
        path, body, headers = attack.build(MODEL, prompt, salt)
        answer = stage.first.post(path, body, GLOBEX_KEY, headers)
        assert answer.status == attack.status, f"{attack.name}: {answer.status} {answer.body}"
        if answer.status >= 400:
            assert answer.error, f"{attack.name}: the refusal is not shaped like OpenAI's errors: {answer.body}"
        found += answer.cached_tokens
        stage.report(f"globex tries {attack.name}: {answer.status} {answer.error[:90]}".rstrip())
    stage.report(f"all {len(ATTACKS)} attempts together: {found} tokens found")
    assert found == 0, f"an attack found {found} tokens"


def a_raised_cache_generation_forgets_one_tenant(stage: Stage) -> None:
    """One edit of a policy makes one tenant's blocks unreachable on every pod; other tenants keep theirs.

    Raise `spec.cacheGeneration` of the tenant's policy, for example in Git. When the policy is enforced again, the
    tenant finds none of its former blocks on any replica.
    """
    prompts, kept = _found_by_both(stage)
    raise_generation(stage.kubectl, "acme")
    _wait_enforced(stage.kubectl, "acme")
    for where in (stage.first, stage.second):
        found = where.found(ACME_KEY, prompts[where.pod])
        stage.report(f"{where.pod}: after the edit, acme finds {found} tokens")
        assert found == 0, f"acme found {found} tokens on {where.pod} after its generation was raised"
    _globex_keeps_its_blocks(stage, kept)


def an_invalidation_completes_when_every_pod_has_acknowledged(stage: Stage) -> None:
    """A CacheInvalidation is Complete when every pod has acknowledged that the blocks are unreachable.

    It has the effect of the edit, as an object that keeps a reason and the time. READY becomes True when every pod has
    acknowledged it. Blocks then age out of the tiers; mode Erase deletes them and writes a receipt.
    """
    prompts, kept = _found_by_both(stage)
    name = fresh_name("acme")
    stage.kubectl.apply(
        _object("CacheInvalidation", name, {"scope": {"tenant": "acme"}, "mode": "Lazy", "reason": "the demo shows it"})
    )
    status = wait_until("the invalidation is complete", lambda: _finished(stage.kubectl, name))
    assert status["phase"] == "Complete", status
    assert status["pods"]["acked"] == status["pods"]["live"] == 2, status["pods"]
    stage.report(stage.kubectl.run("-n", DEMO_NAMESPACE, "get", "cacheinvalidation", name))
    for where in (stage.first, stage.second):
        found = where.found(ACME_KEY, prompts[where.pod])
        assert found == 0, f"acme found {found} tokens on {where.pod} after its invalidation"
    stage.report("acme finds 0 tokens on either replica")
    _globex_keeps_its_blocks(stage, kept)


def a_wrong_policy_is_refused_and_the_last_one_stays(stage: Stage) -> None:
    """A wrong policy is refused, or Stalled with a reason; the tenant's last valid policy stays in force.

    The API server refuses all that the schema can check, also in a dry run. An error that depends on other objects
    appears as the condition Stalled, with a reason and a message. No cached block is lost meanwhile.
    """
    kubectl = stage.kubectl
    refusal = kubectl.refused(
        _object(
            "TenantCachePolicy",
            "wrong",
            {"tenant": "wrong", "isolation": "Public", "budgets": [{"tier": "shared", "limit": "1Gi"}]},
        )
    )
    assert "spec.budgets" in refusal, refusal
    assert "only for isolation Isolated" in refusal, refusal
    stage.report(f"refused by the API server: {refusal.splitlines()[-1]}")
    prompt = fresh_prompt()
    stage.first.ask(ACME_KEY, prompt)
    before = kubectl.get("tenantcachepolicy", "acme", DEMO_NAMESPACE)
    try:
        _patch(kubectl, "tenantcachepolicy", "acme", {"spec": {"budgets": [{"tier": "nowhere", "limit": "1Mi"}]}})
        stalled = _wait_reason(kubectl, "acme", "TierNotFound")
        stage.report(f"acme's policy with an unknown tier: Stalled/{stalled['reason']}: {stalled['message']}")
        enforced = kubectl.condition("tenantcachepolicy", "acme", DEMO_NAMESPACE, "Enforced")
        assert enforced["reason"] == "LastValidInForce", enforced
        found = stage.first.found(ACME_KEY, prompt)
        assert found > 0, "the last enforced policy did not stay in force"
        stage.report(f"meanwhile acme's last valid policy is in force: {found} tokens found")
    finally:
        _patch(kubectl, "tenantcachepolicy", "acme", {"spec": {"budgets": before["spec"].get("budgets")}})
    _wait_enforced(kubectl, "acme")
    stray = _object(
        "TenantCachePolicy",
        "stray",
        {"tenant": "stray", "isolation": "Group", "groupRef": {"name": "nowhere"}, "deletionPolicy": "Abandon"},
    )
    kubectl.apply(stray)
    try:
        stalled = _wait_reason(kubectl, "stray", "GroupNotFound")
        stage.report(f"a policy of an unknown group: Stalled/{stalled['reason']}: {stalled['message']}")
    finally:
        kubectl.run("-n", DEMO_NAMESPACE, "delete", "tenantcachepolicy", "stray")


def tenants_share_a_declared_prefix_and_nothing_after_it(stage: Stage) -> None:
    """Tenants share the blocks of a declared prefix, and none of the blocks after it.

    A PrefixPool names a system message and its readers, here acme and globex. The message is edited, and the blocks of
    the new one are computed once, before the first request: a reader's first question finds the prefix already. The
    text after the prefix stays each tenant's own, and a tenant that is not a reader finds nothing.
    """
    with _new_system_messages(stage) as messages:
        for _, system in zip(range(SPARE), messages, strict=False):
            pool = stage.kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)
            shared_tokens = int(pool["status"]["chunks"]) * CHUNK_TOKENS
            assert shared_tokens > 0, "the pool has no chunks, so finding as many shows nothing"
            stage.report(stage.kubectl.run("-n", DEMO_NAMESPACE, "get", "prefixpool", POOL))
            chat, tokens = _question(system), []
            for name, where, key in (("acme", stage.first, ACME_KEY), ("globex", stage.second, GLOBEX_KEY)):
                answer = where.chat(key, *chat)
                tokens.append(answer.cached_tokens)
                stage.report(f"{name}'s first question after a prefix of {shared_tokens} tokens: {_summary(answer)}")
            if tokens == [shared_tokens] * 2:
                break
        assert tokens == [shared_tokens] * 2, f"acme and globex found {tokens} of a prefix of {shared_tokens} tokens"
        time.sleep(LONG_STORE_SETTLES_S)
        chats = itertools.chain([chat], _asked(stage.second, GLOBEX_KEY, lambda: _question(system)))
        chat, answer = finds_chat(stage.first, GLOBEX_KEY, chats)
        stage.report(f"globex's same question on the other replica, the prefix and its own blocks: {_summary(answer)}")
        assert whole_chunks(answer.prompt_tokens - 1) > shared_tokens, "the question fills no chunk"
        answer = stage.second.chat(DOCS_KEY, *chat)
        stage.report(f"the same question of docs, which is no reader: {_summary(answer)}")
        assert answer.cached_tokens == 0, f"docs found {answer.cached_tokens} tokens of the pool's or globex's blocks"


CHAPTERS = (
    everything_is_ready_and_enforced,
    a_tenant_finds_its_blocks_on_every_replica_and_no_other_tenant_does,
    a_tenant_cannot_reach_anothers_blocks_by_force,
    a_raised_cache_generation_forgets_one_tenant,
    an_invalidation_completes_when_every_pod_has_acknowledged,
    a_wrong_policy_is_refused_and_the_last_one_stays,
    tenants_share_a_declared_prefix_and_nothing_after_it,
    the_shortest_objects_serve_a_tenant,
)


def _fresh_chat() -> Chat:
    """Return a chat of about a thousand tokens that no tenant has sent before, not even its first block."""
    beginning = f"Document {secrets.randbelow(10**19):019}"
    text = f"{beginning}\n\n{' '.join(DOCUMENT.read_text().split())[:DOCUMENT_CHARACTERS]}"
    return {"role": "system", "content": text}, {"role": "user", "content": QUESTION}


def _question(system: Mapping[str, str]) -> Chat:
    """Return a chat after a system message, with a question that no tenant has sent before."""
    return system, {"role": "user", "content": f"{fresh_prompt(BEFORE_QUESTION_TOKENS)} {QUESTION}"}


def _asked(where: Replica, key: str, fresh: Callable[[], Chat]) -> Iterator[Chat]:
    """Yield new chats without end; a tenant has just asked the replica for each."""
    while True:
        chat = fresh()
        where.chat(key, *chat)
        time.sleep(LONG_STORE_SETTLES_S)
        yield chat


def _summary(answer: ChatAnswer) -> str:
    return f"{answer.cached_tokens} tokens found, first word after {answer.first_text_s:.1f} s: {answer.text!r}"


def _found_by_both(stage: Stage) -> tuple[dict[str, str], list[str]]:
    """Return a prompt of acme for each pod, found on both, and prompts that globex asked the first pod for.

    One for each pod: a prompt that acme sends to one again is stored again, and may be found on the other.
    """
    prompts = shared(stage.first, stage.second, ACME_KEY, 2)
    return dict(zip((stage.first.pod, stage.second.pod), prompts, strict=True)), stored(stage.first, GLOBEX_KEY, SPARE)


def _globex_keeps_its_blocks(stage: Stage, kept: list[str]) -> None:
    """See globex find blocks of the first pod on each: in that engine's memory, and in the shared tier."""
    for where in (stage.first, stage.second):
        _, answer = finds(where, GLOBEX_KEY, kept)
        stage.report(f"{where.pod}: globex still finds {answer.cached_tokens} tokens")


@contextmanager
def _new_system_messages(stage: Stage) -> Iterator[Iterator[Mapping[str, str]]]:
    """Let the pool have messages that no tenant has sent before, one after the other, while the block runs."""
    before = stage.kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)["spec"]["prefixes"]
    (own,) = before[0]["messages"]

    def messages() -> Iterator[Mapping[str, str]]:
        while True:
            message = {**own, "content": f"Rules {secrets.token_hex(6)}. {own['content']}"}
            _set_prefixes(stage.kubectl, [{**before[0], "messages": [message]}])
            yield message

    try:
        yield messages()
    finally:
        _set_prefixes(stage.kubectl, before)


def _set_prefixes(kubectl: Kubectl, prefixes: list[dict[str, Any]]) -> None:
    _patch(kubectl, "prefixpool", POOL, {"spec": {"prefixes": prefixes}})
    wait_published(kubectl, POOL)


def wait_published(kubectl: Kubectl, pool: str) -> Mapping[str, Any]:
    """Wait until every serving pod knows the content of the pool's present spec; return the status."""

    def published() -> Mapping[str, Any] | None:
        item = kubectl.get("prefixpool", pool, DEMO_NAMESPACE)
        status: dict[str, Any] = item.get("status") or {}
        conditions = {c["type"]: c for c in status.get("conditions") or ()}
        ready = conditions.get("Ready") or {}
        seen = ready.get("observedGeneration") == item["metadata"]["generation"]
        settled = "next" not in status and status.get("published")
        return status if seen and settled and ready.get("status") == "True" else None

    found: Mapping[str, Any] = wait_until(f"pool {pool} is published", published)
    return found


def raise_generation(kubectl: Kubectl, policy: str) -> None:
    """Raise `spec.cacheGeneration` of a policy by one."""
    generation = kubectl.get("tenantcachepolicy", policy, DEMO_NAMESPACE)["spec"].get("cacheGeneration", 0)
    _patch(kubectl, "tenantcachepolicy", policy, {"spec": {"cacheGeneration": generation + 1}})


def keyspace_of(kubectl: Kubectl, tenant: str, model: str = MODEL, namespace: str = DEMO_NAMESPACE) -> str:
    """Return a tenant's keyspace, as only an administrator can read it from the bundle."""
    for secret in kubectl.list("secret", namespace, f"kvstrata.io/model={model}"):
        raw = (secret.get("data") or {}).get("shard.json")
        if raw is None:
            continue
        for entry in json.loads(base64.b64decode(raw)).get("entries", ()):
            if entry["tenant"] == tenant:
                return str(entry["keyspace"])
    raise AssertionError(f"no bundle holds an entry of {tenant}")


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kvstrata.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": DEMO_NAMESPACE},
        "spec": spec,
    }


def _patch(kubectl: Kubectl, kind: str, name: str, patch: dict[str, Any]) -> None:
    kubectl.run("-n", DEMO_NAMESPACE, "patch", kind, name, "--type", "merge", "-p", json.dumps(patch))


def _wait_enforced(kubectl: Kubectl, policy: str) -> None:
    def enforced() -> bool:
        item = kubectl.get("tenantcachepolicy", policy, DEMO_NAMESPACE)
        status = item.get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        current = status.get("enforcedGeneration") == item["metadata"]["generation"]
        return current and conditions.get("Enforced") == "True"

    wait_until(f"policy {policy} is enforced", enforced)


def _wait_reason(kubectl: Kubectl, policy: str, reason: str) -> dict[str, Any]:
    def stalled() -> dict[str, Any] | None:
        found = kubectl.condition("tenantcachepolicy", policy, DEMO_NAMESPACE, "Stalled")
        return found if found.get("status") == "True" and found.get("reason") == reason else None

    result: dict[str, Any] = wait_until(f"policy {policy} is Stalled/{reason}", stalled)
    return result


def _finished(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    status: dict[str, Any] = kubectl.get("cacheinvalidation", name, DEMO_NAMESPACE).get("status") or {}
    return status if status.get("phase") in ("Complete", "Failed") else None


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

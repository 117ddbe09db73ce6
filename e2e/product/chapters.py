"""Promises of the product, shown on a running domain. The demo prints them; the scenario tests assert them.

Each chapter takes a `Stage` and fails with an AssertionError that names the broken promise. The demo prints the
chapter's docstring, in front of the lines that the chapter reports.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .attacks import ATTACKS
from .calls import Answer, Hits, Replica, replica
from .install import DEMO_NAMESPACE, unsettled
from .kubectl import Kubectl, pod_names, wait_until

MODEL = "tiny"
ACME_KEY = "acme-demo-key"
GLOBEX_KEY = "globex-demo-key"
DOCS_KEY = "docs-demo-key"
POOL = "assistant"
PROMPT_TOKENS = 900
CHUNK_TOKENS = 64
WHOLE_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
"""Tokens of the prompt that fill whole chunks; the tokenizer of the tiny model makes one token of each byte."""

STORE_SETTLES_S = 2.0
"""Blocks are stored behind the answer; they are in the shared tier after this."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A running domain: its API and two replicas of the model. `report` takes lines for a person."""

    kubectl: Kubectl
    first: Replica
    second: Replica
    report: Callable[[str], None]

    def ask(self, where: Replica, key: str, prompt: str) -> tuple[Answer, Hits]:
        """Ask for a completion and return it with the tokens that the engine found cached for it."""
        before = where.hits()
        answer = where.complete(key, prompt)
        assert answer.status == 200, f"{where.pod} answered {answer.status}: {answer.body}"
        return answer, where.hits() - before


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


def fresh_prompt(about: str) -> str:
    """Return a prompt of 900 tokens that no tenant has sent before, not even its first block."""
    text = f"[{time.time_ns()} {about}] " + "The quick brown fox jumps over the lazy dog. " * 30
    return text[:PROMPT_TOKENS]


def everything_is_ready_and_enforced(stage: Stage) -> None:
    """Every object is Ready, and every pod of the model enforces every policy.

    Tenants, budgets, groups and shared prefixes are objects of the cluster; here the tenants are acme, globex and
    docs, among others. READY, with its REASON, is the state to watch. ENFORCED counts the pods that enforce the newest
    edit, of all serving pods. The command: kubectl get cache-status.
    """
    problems = unsettled(stage.kubectl)
    assert not problems, "\n".join(problems)
    stage.report(stage.kubectl.run("-n", DEMO_NAMESPACE, "get", "cache-status"))


def a_tenant_finds_its_blocks_on_every_replica_and_no_other_tenant_does(stage: Stage) -> None:
    """A tenant's cached blocks serve it on every replica; another tenant's identical prompt finds none.

    "Tokens found" are prompt tokens that the engine took from a cache and did not compute again. Caches keep whole
    chunks of 64 tokens, so 896 of a prompt's 900 tokens can be found. An application only sends its API key: the gate
    in front of each engine derives the tenant from it.
    """
    prompt = fresh_prompt("acme")
    answer, found = stage.ask(stage.first, ACME_KEY, prompt)
    stage.report(
        f"acme's new prompt of {PROMPT_TOKENS} tokens on replica 1: {found.external} tokens found, "
        f"{answer.took_s:.2f} s"
    )
    assert found == Hits(0, 0), f"a prompt that no tenant has sent before found {found}"
    time.sleep(STORE_SETTLES_S)
    answer, found = stage.ask(stage.second, ACME_KEY, prompt)
    stage.report(
        f"acme's same prompt on replica 2: {found.external} tokens found in the shared tier, {answer.took_s:.2f} s"
    )
    assert found.external == WHOLE_CHUNKS, f"expected {WHOLE_CHUNKS} tokens from the shared tier, found {found}"
    _, found = stage.ask(stage.first, GLOBEX_KEY, prompt)
    stage.report(f"globex's identical prompt on replica 1: {found.external + found.local} tokens found")
    assert found == Hits(0, 0), f"globex found {found} of acme's blocks on replica 1"
    # Another prompt for the other replica: by now globex has blocks of its own for the first.
    prompt = fresh_prompt("acme again")
    stage.ask(stage.first, ACME_KEY, prompt)
    time.sleep(STORE_SETTLES_S)
    _, found = stage.ask(stage.second, GLOBEX_KEY, prompt)
    stage.report(f"globex's copy of a second prompt of acme on replica 2: {found.external + found.local} tokens found")
    assert found == Hits(0, 0), f"globex found {found} of acme's blocks on replica 2"
    _, found = stage.ask(stage.second, ACME_KEY, prompt)
    assert found.external == WHOLE_CHUNKS, f"the control failed: acme itself found {found} there"


def a_tenant_cannot_reach_anothers_blocks_by_force(stage: Stage) -> None:
    """A tenant that crafts its requests still finds no block of another tenant.

    globex sends acme's prompt with acme's salt, with duplicate and escaped keys, in other encodings and to other
    endpoints. Each line shows the HTTP status of the gate's answer, and the reason of a refusal. This needs no
    configuration: gates check every request.
    """
    prompt = fresh_prompt("secret")
    stage.ask(stage.first, ACME_KEY, prompt)
    time.sleep(STORE_SETTLES_S)
    salt = keyspace_of(stage.kubectl, "acme")
    before = stage.first.hits()
    for attack in ATTACKS:
        path, body, headers = attack.build(MODEL, prompt, salt)
        answer = stage.first.post(path, body, GLOBEX_KEY, headers)
        assert answer.status == attack.status, f"{attack.name}: {answer.status} {answer.body}"
        if answer.status >= 400:
            assert answer.error, f"{attack.name}: the refusal is not shaped like OpenAI's errors: {answer.body}"
        stage.report(f"globex tries {attack.name}: {answer.status} {answer.error[:90]}".rstrip())
    found = stage.first.hits() - before
    stage.report(f"all {len(ATTACKS)} attempts together: {found.external + found.local} tokens found")
    assert found == Hits(0, 0), f"an attack found {found} tokens"
    _, found = stage.ask(stage.second, ACME_KEY, prompt)
    assert found.external == WHOLE_CHUNKS, f"the control failed: there was nothing to find, not even for acme: {found}"


def a_raised_cache_generation_forgets_one_tenant(stage: Stage) -> None:
    """One edit of a policy makes one tenant's blocks unreachable on every pod; other tenants keep theirs.

    Raise `spec.cacheGeneration` of the tenant's policy, for example in Git. When the policy is enforced again, the
    tenant finds none of its former blocks on any replica.
    """
    # One prompt for each pod: a prompt that acme sends again to one pod is stored, and then found on the other.
    prompts = _asked_by_both(stage, "generation")
    generation = int(time.time())
    patch = {"spec": {"cacheGeneration": generation}}
    _patch(stage.kubectl, "tenantcachepolicy", "acme", patch)
    _wait_enforced(stage.kubectl, "acme")
    for where in (stage.first, stage.second):
        _, found = stage.ask(where, ACME_KEY, prompts[where.pod])
        stage.report(f"{where.pod}: after the edit, acme finds {found.local + found.external} tokens")
        assert found == Hits(0, 0), f"acme found {found} on {where.pod} after its generation was raised"
    _globex_keeps_its_blocks(stage, prompts)


def an_invalidation_completes_when_every_pod_has_acknowledged(stage: Stage) -> None:
    """A CacheInvalidation is Complete when every pod has acknowledged that the blocks are unreachable.

    It has the effect of the edit, as an object that keeps a reason and the time. READY becomes True when every pod has
    acknowledged it. Blocks then age out of the tiers; mode Erase deletes them and writes a receipt.
    """
    prompts = _asked_by_both(stage, "invalidation")
    name = f"acme-{time.time_ns() % 10**9}"
    stage.kubectl.apply(
        _object("CacheInvalidation", name, {"scope": {"tenant": "acme"}, "mode": "Lazy", "reason": "the demo shows it"})
    )
    status = wait_until("the invalidation is complete", lambda: _finished(stage.kubectl, name), 60)
    assert status["phase"] == "Complete", status
    assert status["pods"]["acked"] == status["pods"]["live"] == 2, status["pods"]
    stage.report(stage.kubectl.run("-n", DEMO_NAMESPACE, "get", "cacheinvalidation", name))
    for where in (stage.first, stage.second):
        _, found = stage.ask(where, ACME_KEY, prompts[where.pod])
        assert found == Hits(0, 0), f"acme found {found} on {where.pod} after its invalidation"
    stage.report("acme finds 0 tokens on either replica")
    _globex_keeps_its_blocks(stage, prompts)


def a_wrong_policy_is_refused_and_the_last_one_stays(stage: Stage) -> None:
    """A wrong policy is refused, or Stalled with a reason; the tenant's last valid policy stays in force.

    The API server refuses all that the schema can check, also in a dry run. An error that depends on other objects
    appears as the condition Stalled, with a reason and a message. No cached block is lost meanwhile.
    """
    kubectl = stage.kubectl
    refusal = kubectl.refused(
        _object(
            "TenantCachePolicy", "wrong", {"tenant": "wrong", "isolation": "Public", "budgets": [{"tier": "shared"}]}
        )
    )
    assert "spec.budgets" in refusal, refusal
    assert "only for isolation Isolated" in refusal, refusal
    stage.report(f"refused by the API server: {refusal.splitlines()[-1]}")
    prompt = fresh_prompt("policy")
    stage.ask(stage.first, ACME_KEY, prompt)
    before = kubectl.get("tenantcachepolicy", "acme", DEMO_NAMESPACE)
    try:
        _patch(kubectl, "tenantcachepolicy", "acme", {"spec": {"budgets": [{"tier": "nowhere", "limit": "1Mi"}]}})
        stalled = _wait_reason(kubectl, "acme", "TierNotFound")
        stage.report(f"acme's policy with an unknown tier: Stalled/{stalled['reason']}: {stalled['message']}")
        enforced = kubectl.condition("tenantcachepolicy", "acme", DEMO_NAMESPACE, "Enforced")
        assert enforced["reason"] == "LastValidInForce", enforced
        _, found = stage.ask(stage.first, ACME_KEY, prompt)
        assert found.local + found.external > 0, "the last enforced policy did not stay in force"
        stage.report(f"meanwhile acme's last valid policy is in force: {found.local + found.external} tokens found")
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

    A PrefixPool names a system prompt and its readers, here acme and globex. Its blocks are computed once, before the
    first request: a reader's first question finds the prefix already. The text after the prefix stays each tenant's
    own, and a tenant that is not a reader finds nothing.
    """
    pool = stage.kubectl.get("prefixpool", POOL, DEMO_NAMESPACE)
    prefix, shared = str(pool["spec"]["prefixes"][0]["text"]), int(pool["status"]["chunks"]) * CHUNK_TOKENS
    assert shared > 0, "the pool has no chunks, so finding as many shows nothing"
    stage.report(stage.kubectl.run("-n", DEMO_NAMESPACE, "get", "prefixpool", POOL))
    question = f" [{time.time_ns()}] Where does the book of rivers stand? " + "Please look twice. " * 10
    for name, where, key in (("acme", stage.first, ACME_KEY), ("globex", stage.second, GLOBEX_KEY)):
        _, found = stage.ask(where, key, prefix + question)
        stage.report(
            f"{name}'s first question after the prefix of {shared} tokens: {found.local + found.external} tokens found"
        )
        assert found.local + found.external == shared, f"{name} found {found} of a prefix of {shared} tokens"
    time.sleep(STORE_SETTLES_S)
    _, found = stage.ask(stage.first, GLOBEX_KEY, prefix + question)
    own = (len(prefix + question)) // CHUNK_TOKENS * CHUNK_TOKENS
    stage.report(
        f"globex's same question on the other replica: {found.local + found.external} tokens found, "
        "the prefix and its own blocks"
    )
    assert found.local + found.external == own, f"globex found {found} of {own} tokens"
    _, found = stage.ask(stage.second, DOCS_KEY, prefix + question)
    stage.report(f"the same question of docs, which is no reader: {found.local + found.external} tokens found")
    assert found == Hits(0, 0), f"docs found {found} of the pool's or globex's blocks"


CHAPTERS = (
    everything_is_ready_and_enforced,
    a_tenant_finds_its_blocks_on_every_replica_and_no_other_tenant_does,
    a_tenant_cannot_reach_anothers_blocks_by_force,
    a_raised_cache_generation_forgets_one_tenant,
    an_invalidation_completes_when_every_pod_has_acknowledged,
    a_wrong_policy_is_refused_and_the_last_one_stays,
    tenants_share_a_declared_prefix_and_nothing_after_it,
)


def _asked_by_both(stage: Stage, about: str) -> dict[str, str]:
    """Return a prompt for each pod that acme and globex have asked on the first, and that is in the shared tier."""
    prompts = {where.pod: fresh_prompt(f"{about} {where.pod}") for where in (stage.first, stage.second)}
    for prompt in prompts.values():
        for key in (ACME_KEY, GLOBEX_KEY):
            stage.ask(stage.first, key, prompt)
    time.sleep(STORE_SETTLES_S)
    for key in (ACME_KEY, GLOBEX_KEY):
        _, found = stage.ask(stage.first, key, prompts[stage.second.pod])
        assert found.local + found.external >= WHOLE_CHUNKS, f"the control failed: it finds {found} of its own"
    return prompts


def _globex_keeps_its_blocks(stage: Stage, prompts: dict[str, str]) -> None:
    """See globex find its prompt of the first pod on each: in that engine's memory, and in the shared tier."""
    for where in (stage.first, stage.second):
        _, found = stage.ask(where, GLOBEX_KEY, prompts[stage.second.pod])
        stage.report(f"{where.pod}: globex still finds {found.local + found.external} tokens")
        assert found.local + found.external >= WHOLE_CHUNKS, f"globex lost its blocks on {where.pod}: {found}"
    assert found.external == WHOLE_CHUNKS, f"globex lost its blocks in the shared tier: {found}"


def keyspace_of(kubectl: Kubectl, tenant: str, model: str = MODEL) -> str:
    """Return a tenant's keyspace, as only an administrator can read it from the bundle."""
    for secret in kubectl.list("secret", DEMO_NAMESPACE, f"kvstrata.io/model={model}"):
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

    wait_until(f"policy {policy} is enforced", enforced, 60)


def _wait_reason(kubectl: Kubectl, policy: str, reason: str) -> dict[str, Any]:
    def stalled() -> dict[str, Any] | None:
        found = kubectl.condition("tenantcachepolicy", policy, DEMO_NAMESPACE, "Stalled")
        return found if found.get("status") == "True" and found.get("reason") == reason else None

    result: dict[str, Any] = wait_until(f"policy {policy} is Stalled/{reason}", stalled, 30)
    return result


def _finished(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    status: dict[str, Any] = kubectl.get("cacheinvalidation", name, DEMO_NAMESPACE).get("status") or {}
    return status if status.get("phase") in ("Complete", "Failed") else None


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

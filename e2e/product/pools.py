"""A prefix pool of a scenario test, its entry in the bundle, and its blocks in a pod's tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import AdapterState, StateRequest, decode_answer, encode_request
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion, PoolTierState
from kvstrata.reconcile.bundles import assemble

from .calls import Replica
from .chapters import MODEL, Stage, _object, wait_published
from .direct import DirectReplica
from .install import DEMO_NAMESPACE
from .kubectl import Kubectl
from .prompts import CHUNK_TOKENS, fresh_prompt

PREFIX_TOKENS = 206
"""Three whole chunks, and tokens that a continuation could change."""

PREFIX_CHUNKS = PREFIX_TOKENS // CHUNK_TOKENS


def fresh_prefix() -> str:
    """Return a text of `PREFIX_TOKENS` tokens that no pool has declared before."""
    return fresh_prompt(PREFIX_TOKENS)


def fresh_prefixes(count: int) -> list[str]:
    """Return texts of `PREFIX_TOKENS` tokens that no pool has declared before, each different from its beginning on."""
    return [fresh_prefix() for _ in range(count)]


def pool_of(name: str, text: str | Sequence[str], **spec: Any) -> dict[str, Any]:
    """Return a PrefixPool of one text or several in the demo's tiers; `spec` has further fields."""
    texts = [text] if isinstance(text, str) else text
    fields = {
        "modelRef": {"name": MODEL},
        "prefixes": [{"name": f"prefix-{number}", "text": one} for number, one in enumerate(texts)],
        "tiers": [{"name": "cpu"}, {"name": "shared"}],
        **spec,
    }
    return _object("PrefixPool", name, fields)


@contextmanager
def pool(stage: Stage, name: str, text: str | Sequence[str], **spec: Any) -> Iterator[None]:
    """Let a pool be published while the block runs."""
    try:
        stage.kubectl.apply(pool_of(name, text, **spec))
        wait_published(stage.kubectl, name)
        yield
    finally:
        stage.kubectl.run("-n", DEMO_NAMESPACE, "delete", "prefixpool", name, "--ignore-not-found")


def pool_keyspaces(kubectl: Kubectl, name: str, model: str = MODEL, namespace: str = DEMO_NAMESPACE) -> list[str]:
    """Return the keyspaces of a pool's versions, as only an administrator can read them from the bundle."""
    secrets = kubectl.list("secret", namespace, f"kvstrata.io/model={model}")
    found = assemble(model, {secret["metadata"]["name"]: secret for secret in secrets})
    shard = found.bundle.pools.get(name) if found is not None else None
    return [version.keyspace for version in shard.versions] if shard is not None else []


def held(where: Replica, keyspace: str) -> dict[str, PoolTierState]:
    """Return the blocks of a pool's version in a pod's tiers, by the tier's name; empty while they are unknown."""
    if not isinstance(where, DirectReplica):
        raise TypeError("a pod's cache server is asked through its own socket")
    try:
        answer = decode_answer(PoolHolding, where.ask_cache(encode_request(PoolQuestion(keyspace))))
    except (OSError, ContractError):
        return {}
    return {tier.name: tier for tier in answer.tiers} if answer.known else {}


def counts(where: DirectReplica) -> dict[str, int]:
    """Return the counters of a pod's cache server since it began, by tier and name."""
    return dict(decode_answer(AdapterState, where.ask_cache(encode_request(StateRequest()))).counters)

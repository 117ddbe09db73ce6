"""Renderings of prefixes by pods in simulations, and their reports about stored pools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.contract.messages.pod_state import PodState
from kvstrata.contract.messages.pools import (
    MAX_MISSING,
    PoolReport,
    PoolTierState,
    PoolVersionState,
    Rendered,
    WarmOutcome,
)
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES, PoolShard, PoolVersion
from kvstrata.model.pods import Pod
from kvstrata.objects.pod.identity import render_id
from tests.support.objects import Raw

FINGERPRINT = "f1" * 8


def rendered_by(raw: Raw) -> str:
    """Return the render id of the pods of a model as a user wrote it."""
    return render_id(CachedModel.parse({**raw, "metadata": {**raw["metadata"], "uid": "u"}}))


def of(state: PodState) -> str:
    """Return the identity of a pod's blocks; empty with the fingerprint that all pods have at first."""
    return "" if state.fingerprint == FINGERPRINT else f"{state.identity}.{state.fingerprint}"


class Renderer:
    """Makes tokens of prefixes as all pods of a simulation do: a byte is a token, and a chunk has sixteen."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        """Pods and digests of prefixes."""
        self.computed: list[tuple[str, str]] = []
        """The same for warm-ups."""
        self.overrides: dict[str, dict[str, Any]] = {}
        """Fields of the renderings of a pod that are others than those of all pods."""
        self.silent: set[str] = set()
        """Pods that do not answer."""
        self.outcome = WarmOutcome.STORED
        """The outcome of every warm-up."""
        self.stored: dict[str, set[bytes]] = {}
        """The chunks that are stored, by the digits of their scope and `of`; a test may take some away."""
        self.seasoning = b""
        """Decides, beside the text, which tokens a text becomes."""

    def render(self, pod: Pod, state: PodState, prefix: PrefixSource) -> Rendered | None:
        """Return a pod's rendering of a prefix, None if it does not answer."""
        self.asked.append((pod.name, prefix.digest))
        return None if pod.name in self.silent else self._made(pod, state, prefix)

    def _made(self, pod: Pod, state: PodState, prefix: PrefixSource) -> Rendered:
        seasoning = self.overrides.get(pod.name, {}).get("seasoning", self.seasoning)
        data = (prefix.text or "").encode() or prefix.encode()
        hashes, last = b"", seasoning
        for at in range(0, len(data) // 16 * 16, 16):
            last = hashlib.sha256(last + data[at : at + 16]).digest()
            hashes += last
        made = Rendered(
            state.gate_boot, state.cache_boot, pod.render_id, len(data), len(data), 16, 4096, hashes
        )  # fmt: skip
        return replace(made, **{k: v for k, v in self.overrides.get(pod.name, {}).items() if k != "seasoning"})

    def warm(self, pod: Pod, state: PodState, scope: str, prefix: PrefixSource) -> WarmOutcome | None:
        """Compute a prefix, and return the outcome; None if the pod does not answer."""
        self.computed.append((pod.name, prefix.digest))
        if pod.name in self.silent:
            return None
        made = self._made(pod, state, prefix)
        if self.outcome is WarmOutcome.STORED:
            size = CHUNK_HASH_BYTES
            self.stored.setdefault(scope + of(state), set()).update(
                made.hashes[at : at + size] for at in range(0, len(made.hashes), size)
            )
        return self.outcome

    def inspect(self, pod: Pod, state: PodState, uid: str, shards: Iterable[PoolShard]) -> PoolReport | None:
        """Return each tier's blocks of a pool's versions, a block of 1,000 bytes for each chunk."""
        if pod.name in self.silent:
            return None
        versions = [version for shard in shards if shard.uid == uid for version in shard.versions]
        held = tuple(self._holding(version, of(state)) for version in versions)
        return PoolReport(state.gate_boot, state.cache_boot, held, state.fingerprint)

    def _holding(self, version: PoolVersion, fingerprint: str) -> PoolVersionState:
        scope = version.keyspace[:SCOPE_DIGITS]
        size, there = CHUNK_HASH_BYTES, self.stored.get(scope + fingerprint, set())
        chunks = [version.hashes[at : at + size] for at in range(0, len(version.hashes), size)]
        missing = [chunk for chunk in chunks if chunk not in there]
        stored = len(chunks) - len(missing)
        tiers = tuple(PoolTierState(tier, stored, len(chunks), 1000 * stored) for tier in version.tiers)
        names = tuple(chunk.hex() for chunk in missing[:MAX_MISSING])
        return PoolVersionState(scope, version.manifest, True, tiers, names)

"""The keyspaces that a tier knows as revoked.

The set lives in the tier, so that a control plane restored from a backup cannot revive a keyspace. In a cluster one
node has it. A keyspace is checked before its first use and with every sweep; while the node is away, checked ones stay
usable and others are refused. A revocation holds while the policy has the keyspace, even if the set is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from itertools import islice

from kvstrata.contract.store.redis_keys import revoked_key
from kvstrata_sidecar.adapter.policy.enforcement import Refusal
from kvstrata_sidecar.adapter.redis.client.commands import MEMBERS_PER_COMMAND, reads_scores
from kvstrata_sidecar.adapter.redis.client.resp import Command, Transport


class RevokedSet:
    """Knowledge of a domain's set. Thread-safe."""

    def __init__(self, domain: str) -> None:
        self._key = revoked_key(domain).encode()
        self._lock = threading.Lock()
        self._cleared: set[str] = set()
        self.revoked: frozenset[str] = frozenset()

    def refusal(self, transport: Transport, keyspace: str) -> Refusal | None:
        """Return why a keyspace may not be used; asks the tier the first time. Raises as `transport.ask` does."""
        if keyspace in self.revoked:
            return Refusal.REVOKED
        if keyspace in self._cleared:
            return None
        revoked = self._ask(transport, [keyspace])
        with self._lock:
            self.revoked |= revoked
            if not revoked:
                self._cleared.add(keyspace)
        return Refusal.REVOKED if revoked else None

    def learn(self, transport: Transport, keyspaces: Collection[str]) -> None:
        """Ask about all keyspaces of the policy, and drop the others."""
        with self._lock:
            self._cleared.intersection_update(keyspaces)
        revoked = self._ask(transport, keyspaces)
        with self._lock:
            # Revoked keyspaces stay revoked, even if the node came back without the set.
            self.revoked = self.revoked.intersection(keyspaces) | revoked
            self._cleared = set(keyspaces) - self.revoked

    def forget(self) -> None:
        """Ask again about each keyspace before its next use: the tier has other servers."""
        with self._lock:
            self._cleared.clear()

    def _ask(self, transport: Transport, keyspaces: Iterable[str]) -> frozenset[str]:
        names = iter(keyspaces)
        revoked: list[str] = []
        while batch := list(islice(names, MEMBERS_PER_COMMAND)):
            arguments = (b"ZMSCORE", self._key, *(name.encode() for name in batch))
            ((*scores,),) = transport.ask([Command(self._key, arguments, reads_scores(len(batch)))])
            revoked += [name for name, score in zip(batch, scores, strict=True) if score is not None]
        return frozenset(revoked)

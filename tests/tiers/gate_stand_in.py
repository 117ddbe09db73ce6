"""The gate's half of the pod's files and of the adapter's socket, for tests without a gate."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvstrata.contract.messages.adapter import (
    SOCKET_NAME,
    AdapterAck,
    AdapterState,
    ApplyRequest,
    PrefillCost,
    Request,
    StateRequest,
    decode_answer,
    encode_request,
)
from kvstrata.contract.messages.erase import AdapterErased, Amount, ErasedTier, EraseRequest
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import FRESHNESS_FILE, FRESHNESS_FORMAT, POLICY_FILE, CacheView
from kvstrata.contract.policy.tiers import TierRules
from kvstrata.contract.store.redis_keys import resolved

T = TypeVar("T")

DOMAIN = "d0d0d0d0d0d0d0d0"
IDENTITY = "1d1d1d1d1d1d1d1d"
FINGERPRINT = "f1f1f1f1f1f1f1f1"
RESOLVED = resolved(IDENTITY, FINGERPRINT)
KEYSPACE_A = "a" * 32
KEYSPACE_B = "b" * 32
KEYSPACE_UNKNOWN = "c" * 32
STALE_AFTER_S = 300
"""Longer than any test takes: what nobody calls stale has to stay fresh on a busy machine, too."""


class GateStandIn:
    """Writes what a gate writes and asks what a gate asks. `policy_dir` and `link_dir` exist afterwards."""

    def __init__(self, directory: Path, domain: str = DOMAIN) -> None:
        self.domain = domain
        self.policy_dir = directory / "policy"
        self.link_dir = directory / "link"
        self.policy_dir.mkdir()
        self.link_dir.mkdir()
        self.revision = 0

    def write_freshness(self, age_s: float = 0.0) -> None:
        """Say that the last quorum read was sent `age_s` ago; written in place, as the gate does."""
        sent_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(age_s * 1e9)
        descriptor = os.open(self.policy_dir / FRESHNESS_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, FRESHNESS_FORMAT.pack(max(1, sent_ns)), 0)
        os.close(descriptor)

    def view(
        self,
        keyspaces: Iterable[str],
        *,
        revision: int,
        term: int = 1,
        on_stale: str = "Fence",
        budgets: tuple[EnforcedBudget, ...] = (),
    ) -> CacheView:
        """Return a cache view that allows `keyspaces`."""
        rules = Rules(stale_after_s=STALE_AFTER_S, on_stale=on_stale)
        return CacheView(self.domain, revision, term, rules, dict.fromkeys(keyspaces, budgets))

    def write_policy(self, view: CacheView) -> None:
        """Write policy.json by atomic rename."""
        new = self.policy_dir / (POLICY_FILE + ".new")
        new.write_bytes(view.encode())
        new.rename(self.policy_dir / POLICY_FILE)

    def allow(self, *keyspaces: str, on_stale: str = "Fence", budgets: tuple[EnforcedBudget, ...] = ()) -> AdapterAck:
        """Put a policy that allows just `keyspaces` in force and return the acknowledgement."""
        return self.enforce(dict.fromkeys(keyspaces, budgets), on_stale=on_stale)

    def enforce(
        self,
        keyspaces: Mapping[str, tuple[EnforcedBudget, ...]],
        *,
        on_stale: str = "Fence",
        tiers: tuple[TierRules, ...] = (),
    ) -> AdapterAck:
        """Put a policy with a budget for each keyspace in force and return the acknowledgement."""
        self.revision += 1
        self.write_freshness()
        view = self.view(keyspaces, revision=self.revision, on_stale=on_stale)
        self.write_policy(replace(view, keyspaces=keyspaces, tiers=tiers))
        return self.put(ApplyRequest(self.revision, 1), AdapterAck)

    def state(self, *costs: PrefillCost) -> AdapterState:
        """Ask the adapter what it holds, and say what prefill costs."""
        return self.put(StateRequest(costs), AdapterState)

    def erase(self, *keyspaces: str) -> AdapterErased:
        """Have keyspaces erased from what is the server's alone."""
        return self.put(EraseRequest(keyspaces), AdapterErased)

    def erased(self, *keyspaces: str) -> ErasedTier:
        """Have keyspaces erased that left the policy, and return the sum of what became of them in all tiers."""
        rows = self.erase(*keyspaces).tiers
        assert rows, "the policy in force has one of them"
        return ErasedTier(
            "", "", deleted=sum((row.deleted for row in rows), Amount()),
            remaining=sum((row.remaining for row in rows), Amount()),
            problem="; ".join(row.problem for row in rows if row.problem),
            residue="; ".join(row.residue for row in rows if row.residue),
        )  # fmt: skip

    def put(self, request: Request, kind: type[T]) -> T:
        """Ask for something, and return the answer."""
        return decode_answer(kind, self.ask(encode_request(request)))

    def ask(self, line: bytes, timeout_s: float = 60.0) -> bytes:
        """Send one line and return the answer's."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self.link_dir / SOCKET_NAME))
            connection.sendall(line)
            with connection.makefile("rb") as lines:
                return lines.readline()

"""State that all tiers of one cache server share: the enforcement and the link to the gate.

LMCache creates one adapter for each `--l2-adapter` and for each Redis tier of the policy, and the server module that
governs its own memory. The first to acquire the runtime creates it and the last to release it closes it. All must have
the same pod parameters, because one process can enforce one policy only.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import MAX_TIER_USAGE_ROWS, MAX_USAGE_ROWS, AdapterState, ChunkHashes, TierState
from kvstrata.contract.messages.pools import PoolHolding, PoolQuestion
from kvstrata.contract.policy.cache_view import FRESHNESS_FILE, CacheView
from kvstrata.contract.policy.tiers import ACCESS_DIRECTORY, TierRules, authority_file, password_file
from kvstrata.contract.wire import to_wire
from kvstrata_sidecar.adapter.erase import Erasing
from kvstrata_sidecar.adapter.gate_link import PolicyLink
from kvstrata_sidecar.adapter.metrics import page
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.policy.enforcement import Enforcement, FreshnessFile
from kvstrata_sidecar.adapter.pool_report import Hasher, Names, holding_of
from kvstrata_sidecar.adapter.tier.base import AnyTier
from kvstrata_sidecar.adapter.tier.breaker import BreakerState
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.adapter.tier.interface import Block, PodTier, ServerMemory
from kvstrata_sidecar.adapter.tier.restoring import Prefill, Restoring

FIRST_CONTACT_S = 1.0
"""Longest time for the first answers of new tiers' servers."""

LEAVE_TIMEOUT_S = 10.0
"""Time until an apply that waits for a tier to be left is answered with an error; the gate asks again."""

Leave = Callable[[float], object]
"""Ends a tier, within seconds. Raises TimeoutError if it is still in use; repeat until it is not."""

Join = Callable[[Mapping[str, Any]], Leave]
"""Starts a tier by `adapter_params`, behind the tiers that are there. Raises OSError, RuntimeError or ValueError."""

_lock = threading.Lock()
_current: Runtime | None = None


class PolicyTiers:
    """The Redis tiers of a cache server: those that its policy names, joined and left while it runs. Thread-safe.
    `join` is None until the cache server can start tiers.

    A policy is acknowledged once every tier that it does not name is left, so that no thread of this process uses it,
    and every other one is joined. A tier that is described otherwise (user, TLS, cluster, allowed servers) is
    left and joined again. Servers, capacity, retention and the contents of files change a joined tier in place.
    """

    def __init__(self, pod: AdapterParams) -> None:
        self._pod = pod
        self._joined: dict[str, tuple[Mapping[str, Any], Leave]] = {}
        self._lock = threading.Lock()
        self.join: Join | None = None

    def follow(self, tiers: Sequence[TierRules], running: Collection[str]) -> None:
        """Leave and join tiers until they are `tiers`, in this order. Those of `running` that were not joined here were
        named by parameters, and stay. Raises ContractError if it cannot be completed now; it may be repeated."""
        with self._lock:
            joined = self._joined
            wanted = [self._params(one) for one in tiers if one.name in joined or one.name not in running]
            stay = [name for name, (params, _) in joined.items() if params in wanted]
            # LMCache asks tiers in the order in which they were joined.
            while [joined[name][0] for name in stay] != wanted[: len(stay)]:
                stay.pop()
            for name in [name for name in joined if name not in stay]:
                with _step(name):
                    joined[name][1](LEAVE_TIMEOUT_S)
                del joined[name]
            for params in wanted[len(stay) :]:
                if self.join is None:
                    raise ContractError("the cache server cannot start tiers yet")
                name = params["tier"]["name"]
                with _step(name):
                    joined[name] = params, self.join(params)

    def _params(self, rules: TierRules) -> dict[str, Any]:
        folder = Path(self._pod.policy_dir, ACCESS_DIRECTORY)
        tier: dict[str, Any] = {"name": rules.name, "cluster": rules.cluster}
        if rules.tls:
            tier["tls"] = {"ca_file": str(folder / authority_file(rules.name))}
        if rules.username is not None:
            tier["username"] = rules.username
        if rules.password:
            tier["password_file"] = str(folder / password_file(rules.name))
        if rules.encrypts:
            tier["encryption"] = "Required"
        if rules.allowed is not None:
            tier["allowed"] = to_wire(rules.allowed)
        places = {"policy_dir": str(self._pod.policy_dir), "link_dir": str(self._pod.link_dir)}
        return {"domain": self._pod.domain, "identity": self._pod.identity, "tier": tier, **places}


@contextmanager
def _step(tier: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise ContractError(f"tier {tier} cannot be joined or left now: {error}") from error


class Runtime:
    """The enforcement, link, tiers and memory of this process. Use `acquire` and `release`. `names` returns keys of
    chunks' parts, `hasher` names chunks; both are LMCache's, and unknown until `govern`. `ungoverned` is why no LMCache
    runs here; `empty_memory` then names the CPU tier, empty without one."""

    def __init__(self, pod: AdapterParams) -> None:
        self.pod = replace(pod, tier=None)
        self.users = 0
        self.boot = secrets.token_hex(16)
        self.tiers: Sequence[AnyTier] = ()
        """Tiers behind the server's own memory, fastest first."""
        self._tier_names: tuple[str, ...] = ()
        self.memory: ServerMemory | None = None
        self.names: Names = lambda *_: None
        self.hasher: Hasher | None = None
        self.ungoverned = ""
        self.empty_memory: str | None = None
        self.spans = Spans()
        self.prefill = Prefill()
        self._restoring: dict[str, Restoring] = {}
        self.policy_tiers = PolicyTiers(self.pod)
        self._freshness = FreshnessFile(Path(pod.policy_dir, FRESHNESS_FILE))
        self.enforcement = Enforcement(pod.domain, self._freshness.sent_ns)
        self.erasing = Erasing(self)
        self.link = PolicyLink(self)

    def add(self, tier: AnyTier, restoring: Restoring | None = None) -> None:
        if restoring is not None:
            self._restoring[tier.state().name] = restoring
        self._put([*self.tiers, tier])

    def remove(self, tier: AnyTier) -> None:
        self._restoring.pop(tier.state().name, None)
        self._put([other for other in self.tiers if other is not tier])

    def follow(self, view: CacheView) -> None:
        """Leave and join Redis tiers until they are those of `view`, and wait a moment for the servers of new ones, so
        that no tier is reported as away that is being connected. Raises ContractError if that must be repeated."""
        before = self.tiers
        self.policy_tiers.follow(view.tiers, self._tier_names)
        new = [tier for tier in self.tiers if tier not in before]
        give_up_at_s = time.monotonic() + FIRST_CONTACT_S
        while any(tier.state().breaker != BreakerState.CLOSED for tier in new) and time.monotonic() < give_up_at_s:
            time.sleep(FIRST_CONTACT_S / 100)

    def govern(self, memory: ServerMemory | None, names: Names = lambda *_: None, hasher: Hasher | None = None) -> None:
        """Set the server module's view of the server's own memory; None and the defaults when it ends."""
        self.memory, self.names, self.hasher = memory, names, hasher
        self.enforcement.ages.memory = memory

    def chunk_tokens(self) -> int | None:
        """Return the tokens of a chunk, None until the server module has started."""
        return None if self.hasher is None else self.hasher.chunk_tokens

    def passes_on(self, keyspace: str) -> bool:
        """Whether the scope may use any tier behind the server's own memory."""
        return any(not self.enforcement.denies(keyspace, name) for name in self._tier_names)

    def held_faster(self) -> Callable[[Block], bool]:
        """Return a check whether memory in use by a reader, or files added before, serve a block instead."""
        faster = tuple(tier for tier in self.tiers if tier.per_pod)

        def held(block: Block) -> bool:
            memory = self.memory
            if memory is not None and memory.holds(block.keyspace, block):
                return True
            return any(tier.holds(block.keyspace, block) for tier in faster)

        return held

    def _put(self, tiers: list[AnyTier]) -> None:
        self.tiers, self._tier_names = tiers, tuple(tier.state().name for tier in tiers)

    def all_tiers(self) -> list[PodTier]:
        return [*self.tiers] if self.memory is None else [*self.tiers, self.memory]

    def state(self) -> AdapterState:
        view, memory, tiers = self.enforcement.view, self.memory, self.all_tiers()
        states = [self._with_restores(tier.state()) for tier in tiers]
        counters = {
            f"{'memory' if tier is memory else state.name}.{name}": count
            for state, tier in zip(states, tiers, strict=True)
            for name, count in sorted(tier.counters().items())
        }
        shared = [row for tier in tiers if not tier.per_pod for row in tier.usage()]
        own = sorted((row for tier in tiers if tier.per_pod for row in tier.usage()), key=lambda row: -row.used_bytes)
        return AdapterState(
            boot=self.boot,
            revision=view.revision if view else 0,
            term=view.term if view else 0,
            fresh=self.enforcement.fresh(),
            keyspaces=len(view.keyspaces) if view else 0,
            tiers=tuple(state for state in states if state.name),
            counters=counters,
            usage=tuple(own[:MAX_USAGE_ROWS]),
            usage_left_out=max(0, len(own) - MAX_USAGE_ROWS),
            tier_usage=tuple(sorted(shared, key=lambda row: -row.used_bytes)[:MAX_TIER_USAGE_ROWS]),
            ungoverned=self.ungoverned,
            fingerprints=tuple(self.enforcement.fingerprints()),
        )

    def _with_restores(self, state: TierState) -> TierState:
        restoring = self._restoring.get(state.name)
        if restoring is None:
            return state
        return replace(state, restore=restoring.state(), declining=restoring.declining)

    def metrics(self) -> str:
        return page(self.state(), self.tiers, self.memory)

    def hash(self, tokens: bytes) -> ChunkHashes:
        """Raises ContractError until the server module has started."""
        hasher = self.hasher
        if hasher is None:
            raise ContractError("the names of chunks are unknown: the cache server's module has not started")
        return ChunkHashes(self.boot, hasher.chunk_tokens, hasher.hashes(tokens))

    def pool(self, question: PoolQuestion) -> PoolHolding:
        """Return the tiers' holdings of a pool. Raises ContractError if the policy has no such pool."""
        enforcement, memory = self.enforcement, self.memory
        tiers = {tier.state().name: tier.sizes for tier in self.all_tiers()}
        return holding_of(
            self.boot, question, enforcement.view, enforcement.readable, self.names, tiers,
            memory=None if memory is None else (memory.state().name, memory.offer),
        )  # fmt: skip

    def close(self) -> None:
        self.link.close()
        self.enforcement.keys.retire({})
        self._freshness.close()


def acquire(params: AdapterParams) -> Runtime:
    """Return this process' runtime, created if need be. Raises ValueError if it has another pod's parameters."""
    global _current
    with _lock:
        if _current is None:
            _current = Runtime(params)
        elif _current.pod != replace(params, tier=None):
            raise ValueError("all adapters of a cache server need the same domain, identity, policy_dir and link_dir")
        _current.users += 1
        return _current


def release(runtime: Runtime) -> None:
    """Release the runtime; the last user closes it."""
    global _current
    with _lock:
        runtime.users -= 1
        if runtime.users > 0:
            return
        if _current is runtime:
            _current = None
    runtime.close()

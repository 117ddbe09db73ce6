"""What all tiers of one cache server share: the enforcement and the link to the gate.

LMCache creates one adapter for each `--l2-adapter`, and the server module that governs its own memory. The first to
acquire the runtime creates it and the last to release it closes it; all have to agree on the pod's parameters, because
one process can enforce one policy only.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace

from kvstrata.contract import ContractError
from kvstrata.contract.cacheview import FRESHNESS_FILE
from kvstrata.contract.link import MAX_TIER_USAGE_ROWS, AdapterState, PurgeAnswer

from .enforcement import Enforcement, FreshnessFile
from .link import PolicyLink
from .memory.governor import Governor
from .metrics import page
from .params import AdapterParams
from .tier import Tier

_lock = threading.Lock()
_current: Runtime | None = None


class Runtime:
    """The enforcement, the link, the tiers and the memory of this process. Use `acquire` and `release`.

    `memory` governs the server's own memory; None until its server module is there.
    """

    def __init__(self, pod: AdapterParams) -> None:
        self.pod = replace(pod, tier=None)
        self.users = 0
        self._boot = secrets.token_hex(16)
        self._tiers: list[Tier] = []
        self.memory: Governor | None = None
        self._freshness = FreshnessFile(pod.policy_dir / FRESHNESS_FILE)
        self.enforcement = Enforcement(pod.domain, self._freshness.sent_ns)
        self.link = PolicyLink(pod.link_dir, pod.policy_dir, self.enforcement, self._boot, self)

    def add(self, tier: Tier) -> None:
        """Report this tier to the gate from now on."""
        self._tiers = [*self._tiers, tier]

    def remove(self, tier: Tier) -> None:
        """Report this tier no more."""
        self._tiers = [other for other in self._tiers if other is not tier]

    def state(self) -> AdapterState:
        """Return what the gate passes on to the operator."""
        view = self.enforcement.view
        tiers = self._tiers
        states = tuple(tier.state() for tier in tiers)
        counters = {
            f"{state.name}.{name}": count
            for state, tier in zip(states, tiers, strict=True)
            for name, count in sorted(tier.counters().items())
        }
        memory = self.memory
        if memory is not None:
            counters |= {f"memory.{name}": count for name, count in sorted(memory.counters().items())}
        tier_usage = [row for tier in tiers for row in tier.usage()]
        usage, left_out = memory.usage() if memory is not None else ((), 0)
        return AdapterState(
            boot=self._boot,
            revision=view.revision if view else 0,
            term=view.term if view else 0,
            fresh=self.enforcement.fresh(),
            keyspaces=len(view.keyspaces) if view else 0,
            tiers=states if memory is None else (*states, *memory.states()),
            counters=counters,
            usage=usage,
            usage_left_out=left_out,
            tier_usage=tuple(sorted(tier_usage, key=lambda row: -row.used_bytes)[:MAX_TIER_USAGE_ROWS]),
        )

    def metrics(self) -> str:
        """Return a page in Prometheus' text format."""
        memory = self.memory
        return page(self.state(), self._tiers, memory.evictions() if memory is not None else {})

    def purge(self, keyspaces: Sequence[str]) -> PurgeAnswer:
        """Erase keyspaces from the server's own memory. Raises ContractError where nobody governs it."""
        memory = self.memory
        if memory is None:
            raise ContractError("this cache server's own memory is not governed: its server module was not started")
        return memory.purge(keyspaces, self._boot)

    def policy_applied(self) -> None:
        """Let tiers and memory follow a new view at once."""
        for tier in self._tiers:
            tier.policy_changed()
        memory = self.memory
        if memory is not None:
            memory.policy_changed()

    def close(self) -> None:
        """Stop answering the gate and overwrite the data keys."""
        self.link.close()
        self.enforcement.keys.retire({})
        self._freshness.close()


def acquire(params: AdapterParams) -> Runtime:
    """Return this process' runtime, created if need be. Raises ValueError if it runs for another pod's parameters."""
    global _current
    pod = replace(params, tier=None)
    with _lock:
        if _current is None:
            _current = Runtime(pod)
        elif _current.pod != pod:
            raise ValueError("all adapters of a cache server need the same domain, identity, policy_dir and link_dir")
        _current.users += 1
        return _current


def release(runtime: Runtime) -> None:
    """Give the runtime back; the last user closes it."""
    global _current
    with _lock:
        runtime.users -= 1
        if runtime.users > 0:
            return
        if _current is runtime:
            _current = None
    runtime.close()

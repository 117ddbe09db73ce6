"""The Redis tiers of a cache server: those that its policy names, joined and left while it runs.

A policy is acknowledged once every tier that it does not name is left, so that no thread of this process uses it, and
every other one is joined. A tier that is described otherwise (user, TLS, cluster, allowed servers) is left and joined
again. Servers, capacity, retention and the contents of files change a joined tier in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstrata.contract import ContractError
from kvstrata.contract.policy.tiers import ACCESS_DIRECTORY, TierRules, authority_file, password_file
from kvstrata.contract.wire import to_wire
from kvstrata_sidecar.adapter.params import AdapterParams

LEAVE_TIMEOUT_S = 10.0
"""Time until an apply that waits for a tier to be left is answered with an error; the gate asks again."""

Leave = Callable[[float], object]
"""Ends a tier, within seconds. Raises TimeoutError if it is still in use; repeat until it is not."""

Join = Callable[[Mapping[str, Any]], Leave]
"""Starts a tier by `adapter_params`, behind the tiers that are there. Raises OSError, RuntimeError or ValueError."""


class PolicyTiers:
    """Thread-safe. `join` is None until the cache server can start tiers."""

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

"""A small domain behind a proxy that misbehaves, its users beside the proxy, and what they can see."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvstrata.clients.resources import BY_KIND, SECRET
from kvstrata.contract import ContractError
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Entry, Root, decode_shard
from kvstrata.objects import names
from kvstrata.reconcile.queue import MAX_WAIT_S
from tests.api.apiserver import ApiServer, RefusedError
from tests.apiserver.operator_process import OperatorProcess, Operators, total
from tests.support import objects
from tests.support.api_proxy import ApiProxy, Exchange
from tests.support.api_proxy_faults import WRITES

NAMESPACE = objects.NAMESPACE
MODEL = "tiny"
TENANTS = tuple(f"tenant-{number}" for number in range(6))
NOT_THE_LEASE = "^(?!.*/(leases|tokenreviews))"
STATUS_OF_POLICIES = r"/tenantcachepolicies/[^/]+/status$"
SETTLES_WITHIN_S = 90.0
LEADS_WITHIN_S = 90.0
"""A Lease whose holder was killed runs out first."""

Raw = dict[str, Any]


@dataclass(slots=True)
class FaultyWorld:
    """The API server, its misbehaving proxy, and a domain with a model and some tenants."""

    api: ApiServer
    proxy: ApiProxy
    operators: Operators
    _last: OperatorProcess | None = None

    def populate(self) -> None:
        """Make the domain, as its users would."""
        for namespace in (NAMESPACE, self.operators.namespace):
            self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        # Those that are deleted are gone at once.
        policies = [objects.policy(tenant, deletionPolicy="Abandon") for tenant in TENANTS]
        for made in (objects.cpu_tier(), objects.model(MODEL, tiers=("cpu",)), *policies):
            self.api.create(made)

    def start(self, name: str, **variables: str) -> OperatorProcess:
        """Start an operator behind the proxy and wait until the domain is settled."""
        running = self.operators.start(name, **{"KUBECONFIG": str(self.proxy.kubeconfig), **variables})
        self._last = running
        running.wait_until_leading(LEADS_WITHIN_S)
        there = [name for name in TENANTS if self.get("TenantCachePolicy", name)]
        self.wait("the domain to settle", lambda: all(self.settled("TenantCachePolicy", name) for name in there))
        self.wait("the bundle", lambda: set(self.entries()) == set(there))
        self.wait("the operator to come to rest", self.at_rest)
        return running

    def started(self, name: str, **variables: str) -> OperatorProcess:
        """Return the operator that was started last; start one if there is none, or if it ended in a former test."""
        if self._last is None or self._last.process.poll() is not None:
            return self.start(name, **variables)
        return self._last

    def get(self, kind: str, name: str, namespace: str = NAMESPACE) -> Raw:
        """Return an object; empty if there is none."""
        try:
            return self.api.get(BY_KIND[kind].path(namespace, name))
        except RefusedError as error:
            if error.status != 404:
                raise
            return {}

    def edit(self, tenant: str, **spec: Any) -> None:
        """Change a tenant's policy, not through the proxy."""
        self.api.merge_patch(objects.policy(tenant), {"spec": spec})

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, not through the proxy."""
        self.api.delete_path(BY_KIND[kind].path(NAMESPACE, name))

    def settled(self, kind: str, name: str) -> bool:
        """Whether an object's status is of its present generation and nothing is in progress."""
        found = self.get(kind, name)
        status = found.get("status") or {}
        in_progress = any(c["type"] == "Reconciling" for c in status.get("conditions") or ())
        return not in_progress and status.get("observedGeneration") == found["metadata"]["generation"]

    def bundle(self) -> Bundle:
        """The model's bundle as pods would read it."""
        root = Root.decode(self._secret(names.bundle_root(MODEL), ROOT_DATA_KEY))
        entries: dict[str, Entry] = {}
        for ref in root.shards:
            data = self._secret(names.bundle_shard(MODEL, ref.index, ref.slot), SHARD_DATA_KEY)
            entries |= {entry.tenant: entry for entry in decode_shard(data, ref.digest)}
        return Bundle(root, entries)

    def entries(self) -> dict[str, Entry]:
        """The bundle's entries by tenant; none while it does not exist, or was rewritten twice while it was read."""
        try:
            return dict(self.bundle().entries)
        except (RefusedError, ContractError):
            return {}

    def suspended(self, tenant: str) -> bool:
        """Whether a tenant is suspended in the bundle, which may be rewritten at the first attempts to read it."""
        found: dict[str, Entry] = {}

        def is_read() -> bool:
            found.update(self.entries())
            return tenant in found

        self.wait(f"{tenant} in the bundle", is_read)
        return found[tenant].suspended

    def is_out(self, tenant: str) -> bool:
        """Whether the bundle can be read and has nothing of a tenant."""
        entries = self.entries()
        return bool(entries) and tenant not in entries

    def carried_out(self, tenant: str, *, suspended: bool) -> bool:
        """Whether an edit of `suspend` is in the bundle and in the policy's status."""
        entry = self.entries().get(tenant)
        return entry is not None and entry.suspended == suspended and self.settled("TenantCachePolicy", tenant)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = SETTLES_WITHIN_S) -> float:
        """Wait until something holds; return how many seconds that took."""
        began = time.monotonic()
        while not holds():
            tail = self._last.log_tail() if self._last else ""
            assert time.monotonic() < began + timeout_s, f"waited {timeout_s:.0f} s in vain for {what}\n{tail}"
            time.sleep(0.1)
        return time.monotonic() - began

    def condition(self, kind: str, name: str, condition: str) -> str:
        """Status of a condition; empty if it is not there."""
        conditions = (self.get(kind, name).get("status") or {}).get("conditions") or ()
        return next((str(c["status"]) for c in conditions if c["type"] == condition), "")

    def at_rest(self, late_s: float = 0.5) -> bool:
        """Whether the operator, which may be late, writes nothing but its Lease for longer than a status is put off."""
        before = len(self.writes())
        time.sleep(MAX_WAIT_S + late_s)
        return before == len(self.writes())

    def writes(self, since: float = 0.0) -> list[Exchange]:
        """What operators asked to change so far, but for the Lease; questions by POST are none."""
        return self.proxy.requests(NOT_THE_LEASE, methods=WRITES, since=since)

    def _secret(self, name: str, key: str) -> bytes:
        return base64.b64decode(self.api.get(SECRET.path(NAMESPACE, name))["data"][key])


def assert_well(running: OperatorProcess) -> None:
    """The process was not restarted, leads, is healthy and met no defect of its own."""
    health, (_, metrics) = running.answer("/livez"), running.answer("/metrics")
    assert running.process.poll() is None, running.log_tail()
    assert health == (200, "ok\n")
    assert total(metrics, "kvstrata_leading") == 1
    assert total(metrics, "kvstrata_reconcile_failures_total", reason="Bug") == 0, running.log_tail()


def gaps_s(times: Iterable[float]) -> list[float]:
    """The seconds between neighbours."""
    ordered = sorted(times)
    return [after - before for before, after in pairwise(ordered)]

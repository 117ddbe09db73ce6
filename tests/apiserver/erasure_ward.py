"""A namespace of its own with a model, two pods, an encrypted shared tier, one that is not, and two tenants: what can
be ordered to be erased there, and what can be looked at without the operator."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import redis

from e2e.cluster.control_plane import ControlPlane
from kvstrata.contract import ContractError
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.receipt.record import Receipt, read_receipt
from kvstrata.objects.erasure.receipts import read_receipt_objects
from tests.api.apiserver import ApiServer, RefusedError
from tests.apiserver.erasure_observer import Fact
from tests.apiserver.inference_pod import InferencePod
from tests.apiserver.kubelet import wait
from tests.support.objects import cpu_tier, invalidation, model, own, policy
from tests.tiers.redis_process import RedisProcess

LEAVES, STAYS = "acme", "globex"
PATIENCE_S = 300.0


class Ward:
    """One such namespace. `shared` are the servers of the encrypted tier, reached at `port`; `opened` is the other's
    server; `address` gives loopback addresses that nobody else has."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        operator_namespace: str,
        shared: list[RedisProcess],
        opened: RedisProcess,
        address: Callable[[], str],
        port: int | None = None,
    ) -> None:
        self.namespace, self._operator_namespace = namespace, operator_namespace
        self.shared, self.opened = shared, opened
        self._port = port or shared[0].port
        self.api = ApiServer(plane.kubeconfig)
        self._eyes = ApiServer(plane.kubeconfig)
        request = self.api._call
        self.pods = [InferencePod(request, plane.kubeconfig, namespace, f"tiny-{n}", address()) for n in (0, 1)]
        self.leaving = self.staying = ""
        self._data_key = b""

    @property
    def _is_cluster(self) -> bool:
        return len(self.shared) > 1

    def furnish(self) -> None:
        """Make the namespace and all that its users declare."""
        for kind, metadata in (
            ("Namespace", {"name": self.namespace}),
            ("Secret", {"name": "keys", "namespace": self.namespace}),
        ):
            data = {"data": {"keys.json": base64.b64encode(b'{"keys": []}').decode()}} if kind == "Secret" else {}
            self.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata, **data})
        tiers: list[tuple[str, int, str, dict[str, Any]]] = [
            ("shared", self._port, "Required", {"cluster": True} if self._is_cluster else {}),
            ("open", self.opened.port, "Disabled", {}),
        ]
        for name, port, encryption, more in tiers:
            external = {"external": {"endpoints": [f"127.0.0.1:{port}"], **more}}
            spec = {"medium": "Redis", "capacity": "64Mi", "encryption": encryption, "redis": external}
            self._create(own("CacheTier", name, spec))
        files = {"medium": "NVMe", "capacityPerPod": "64Mi", "nvme": {"emptyDir": {}}}
        self._create(own("CacheTier", "files", files))
        for raw in (cpu_tier(), model(tiers=("cpu", "files", "shared", "open")), policy(LEAVES), policy(STAYS)):
            self._create(raw)

    def start_pods(self) -> None:
        """Start the pods once all is there that they need."""
        for what in ("secrets/kvs-tiny-gate-tls", "serviceaccounts/kvs-tiny"):
            self.wait(what, lambda what=what: self._core(what))  # type: ignore[misc]
        domain = self.wait("the domain's id", lambda: self.object("cachedomains", "default")["status"].get("domainID"))
        for pod in self.pods:
            pod.start(domain, self._port, self.opened.port, cluster=self._is_cluster)

    def fill(self) -> None:
        """Have both pods hold blocks of both tenants everywhere, once they enforce."""
        for tenant in (LEAVES, STAYS):
            self.wait(f"{tenant} to be enforced", lambda tenant=tenant: self._enforced(tenant))  # type: ignore[misc]
        self.leaving, self.staying = self._keyspace(LEAVES), self._keyspace(STAYS)
        for number, pod in enumerate(self.pods):
            pod.store(self.leaving, *range(1 + number, 11, 2))
            pod.store(self.staying, 21 + number)
        epoch = self.object("tenantcachepolicies", LEAVES)["status"]["scope"]["epoch"]
        self._data_key = next(values[epoch] for values in self._secrets() if epoch in values)

    def order(self) -> None:
        """Order the erasure of the tenant that leaves."""
        self._create(invalidation("leave", scope={"tenant": LEAVES}, mode="Eager", reason="the contract ended"))

    @property
    def uid(self) -> str:
        """The uid of the order."""
        return str(self.object("cacheinvalidations", "leave")["metadata"]["uid"])

    @property
    def status(self) -> dict[str, Any]:
        """What the invalidation says."""
        return dict(self.object("cacheinvalidations", "leave").get("status") or {})

    def await_end(self) -> None:
        """Wait until it is complete or has failed, and nothing is kept of it."""
        self.wait("the end", lambda: self.status.get("phase") in ("Complete", "Failed"))
        self.wait(
            "the object to be let go",
            lambda: not self.object("cacheinvalidations", "leave")["metadata"].get("finalizers"),
        )

    def receipts(self) -> list[tuple[bytes, Receipt]]:
        """Return the receipts of this domain that are stored, and what is in them."""
        stored = self._config_maps(self.api)
        found = [(data, read_receipt(data)) for _, data in read_receipt_objects(stored) if isinstance(data, bytes)]
        return [(data, one) for data, one in found if one.record.head.namespace == self.namespace]

    def public_key(self) -> str:
        """The key that signed."""
        (pem,) = self._config_maps(self.api)["kvstrata-receipts-keys"]["data"].values()
        return str(pem)

    def names_with(self, keyspace: str) -> list[bytes] | None:
        """Return what the servers hold of a keyspace, but for tombstones; None if one went while it was asked."""
        try:
            return [
                name
                for one in (*self.shared, self.opened)
                if one.running
                for name in one.admin().scan_iter(f"*{keyspace}*", count=1000)
                if not name.endswith(b"#s")
            ]
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
            return None

    def facts(self) -> Mapping[str, Fact]:
        """What each condition stands for, as one can see it without the operator."""
        return {
            "LogicallyInvalid": lambda _: "".join(
                f"{pod.name} may use the keyspace" for pod in self.pods if pod.may_use(self.leaving)
            ),
            "KeysRevoked": lambda _: "a Secret has the data key" if self._key_is_somewhere() else "",
            "Erased": lambda _: self._what_is_left(),
            "Verified": lambda _: self._what_is_left(),
            "Complete": lambda digest: "" if self._has_receipt(digest) else f"no receipt has the digest {digest}",
            "KeysDestroyed": lambda _: "nobody can know of keys in Secrets",
            "Failed": lambda _: "nothing of it cannot be done",
        }

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        """Wait until something is so, and return it."""
        try:
            return wait(f"{what} in {self.namespace}", holds, PATIENCE_S)
        except AssertionError as error:
            gates = "\n--\n".join(pod.log_tail() for pod in self.pods if (pod.directory / "gate.log").exists())
            with contextlib.suppress(RefusedError):
                gates = f"{json.dumps(self.status, indent=1)}\n{gates}"
            raise AssertionError(f"{error}\n{gates}") from error

    def object(self, plural: str, name: str) -> dict[str, Any]:
        """An object of our API."""
        return self.api.get(f"/apis/kvstrata.io/v1alpha1/namespaces/{self.namespace}/{plural}/{name}")

    def close(self) -> None:
        """End pods, and connections."""
        for pod in self.pods:
            pod.stop()
        self.api.close()
        self._eyes.close()

    def _create(self, raw: Mapping[str, Any]) -> None:
        self.api.create({**raw, "metadata": {**raw["metadata"], "namespace": self.namespace}})

    def _core(self, what: str) -> bool:
        try:
            return bool(self.api.get(f"/api/v1/namespaces/{self.namespace}/{what}"))
        except RefusedError:
            return False

    def _keyspace(self, tenant: str) -> str:
        epoch = self.object("tenantcachepolicies", tenant)["status"]["scope"]["epoch"]
        key = next(values["domain.key"] for values in self._secrets() if "domain.key" in values)
        return derive_keyspace(key, Scope(ScopeKind.TENANT, tenant), epoch)

    def _enforced(self, tenant: str) -> bool:
        conditions = self.object("tenantcachepolicies", tenant).get("status", {}).get("conditions", ())
        return any(one["type"] == "Enforced" and one["status"] == "True" for one in conditions)

    def _secrets(self) -> list[dict[str, bytes]]:
        items = self._eyes.get(f"/api/v1/namespaces/{self.namespace}/secrets")["items"]
        return [{key: base64.b64decode(value) for key, value in (raw.get("data") or {}).items()} for raw in items]

    def _key_is_somewhere(self) -> bool:
        forms = (self._data_key, base64.b64encode(self._data_key))
        return any(form in value for values in self._secrets() for value in values.values() for form in forms)

    def _what_is_left(self) -> str | None:
        held = {pod.name: blocks for pod in self.pods if (blocks := pod.holds(self.leaving))}
        names = self.names_with(self.leaving)
        if held or names:
            return f"pods hold {held}, servers {names}"
        return None if names is None else ""

    def _has_receipt(self, digest: str) -> bool:
        stored = self._config_maps(self._eyes)
        for _, data in read_receipt_objects(stored):
            with contextlib.suppress(ContractError):
                if isinstance(data, bytes) and digest and read_receipt(data).link.digest == digest:
                    return True
        return False

    def _config_maps(self, api: ApiServer) -> dict[str, dict[str, Any]]:
        items = api.get(f"/api/v1/namespaces/{self._operator_namespace}/configmaps")["items"]
        return {item["metadata"]["name"]: item for item in items}

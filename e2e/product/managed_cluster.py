"""A Redis Cluster that the operator runs in pods, as stories see it: its spec, its pods, and whether it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.objects import paths

from .faults import Victim
from .install import DEMO_NAMESPACE
from .kubectl import CommandError, Kubectl, wait_until

WHOLE_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class ManagedCluster:
    """A CacheTier of the demo's namespace with `redis.managed.shards`; `settings` are those of every apply."""

    kubectl: Kubectl
    name: str
    capacity: str = "96Mi"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, **managed: Any) -> None:
        """Declare it: three shards with a replica each, in small containers, with the changes of `managed`."""
        small = {"requests": {"cpu": "20m", "memory": "96Mi"}}
        settings = {"shards": 3, "replicasPerShard": 1, "resources": small, **self.settings, **managed}
        spec = {"medium": "Redis", "capacity": self.capacity, "redis": {"managed": settings}}
        metadata = {"name": self.name, "namespace": DEMO_NAMESPACE}
        self.kubectl.apply(
            {"apiVersion": "kvstrata.io/v1alpha1", "kind": "CacheTier", "metadata": metadata, "spec": spec}
        )

    def delete(self) -> None:
        """Remove it, and return when its pods are gone."""
        self.kubectl.run("-n", DEMO_NAMESPACE, "delete", "cachetier", self.name, "--ignore-not-found")
        wait_until("its pods go", lambda: not self.pods())

    def status(self) -> dict[str, Any]:
        """Its status."""
        return dict(self.kubectl.get("cachetier", self.name, DEMO_NAMESPACE).get("status") or {})

    def pods(self) -> list[dict[str, Any]]:
        """Every pod of the tier."""
        return self.kubectl.list("pod", DEMO_NAMESPACE, f"kvstrata.io/tier={self.name}")

    def settled(self, shards: int = 3) -> bool:
        """Whether the tier is Ready at its newest generation, with so many shards, and has nothing left to do."""
        found = self.kubectl.get("cachetier", self.name, DEMO_NAMESPACE)
        status = found.get("status") or {}
        ready = next((one for one in status.get("conditions") or () if one["type"] == "Ready"), {})
        return bool(
            ready.get("status") == "True"
            and ready.get("observedGeneration") == found["metadata"]["generation"]
            and status.get("shardsReady") == shards
            and not status.get("progress")
            and all(_is_ready(pod) for pod in self.pods())
        )

    def wait_whole(self, shards: int = 3) -> None:
        """Return when it is settled. Raises AssertionError with its status if it is not in time."""
        try:
            wait_until("the cluster is whole", lambda: self.settled(shards), WHOLE_WITHIN_S)
        except AssertionError as late:
            raise AssertionError(f"{late}; the tier's status is {self.status()}") from late

    def primary(self, shard: int) -> dict[str, Any]:
        """Return the pod of a shard whose server leads, by the server's own report."""

        def leading() -> dict[str, Any] | None:
            of_shard = f"kvs-{self.name}-redis-{shard}-"
            pods = [pod for pod in self.pods() if pod["metadata"]["name"].startswith(of_shard)]
            return next((pod for pod in pods if self._role(pod["metadata"]["name"]) == "master"), None)

        found: dict[str, Any] = wait_until(f"shard {shard} has a primary", leading)
        return found

    def delete_pod(self, pod: dict[str, Any]) -> None:
        """Ask for a pod to go, and do not wait."""
        self.kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", pod["metadata"]["name"], "--wait=false")

    def kill(self, pod: dict[str, Any]) -> None:
        """Kill a pod's server; the pod stays, and starts another."""
        Victim(self.kubectl, DEMO_NAMESPACE, pod["metadata"]["name"], "redis").send(9)

    def replaced(self, pod: dict[str, Any]) -> bool:
        """Whether another pod has this one's name."""
        try:
            found = self.kubectl.get("pod", pod["metadata"]["name"], DEMO_NAMESPACE)
        except CommandError:
            return False
        return bool(found["metadata"]["uid"] != pod["metadata"]["uid"])

    def all_new(self, before: list[dict[str, Any]]) -> bool:
        """Whether there are pods of the same names, and none of these."""
        pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.pods()}
        old = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in before}
        return pods.keys() == old.keys() and not set(pods.values()) & set(old.values())

    def _role(self, pod: str) -> str:
        """Role that a server reports, asked as its admin, whose password is in the file that it was started with."""
        plain = dict(self.settings.get("tls") or {}).get("mode") == "Disabled"
        tls = "" if plain else f"--tls --cacert {paths.REDIS_TLS}/ca.crt"
        client = f"$(command -v redis-cli || command -v valkey-cli) -h 127.0.0.1 {tls} --user admin"
        ask = f"REDISCLI_AUTH=$(cat {paths.REDIS_AUTH}/admin-password) {client} role"
        try:
            role = self.kubectl.exec(pod, DEMO_NAMESPACE, "redis", "sh", "-c", ask)
        except CommandError:
            return ""
        return role.splitlines()[0].strip() if role else ""


def _is_ready(pod: dict[str, Any]) -> bool:
    if "deletionTimestamp" in pod["metadata"]:
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())

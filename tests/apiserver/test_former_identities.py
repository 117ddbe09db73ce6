"""A model that is replaced, rolled back and replaced for good: a real API server, operators of which one is killed, a
Redis server, and the deletion as a process. Pods and the Deployment's controller are what the test says they are."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.control_plane import ControlPlane
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.store.redis_keys import parse_block_key
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from tests.api.apiserver import ApiServer, RefusedError
from tests.apiserver.conftest import REPOSITORY, install_crds
from tests.apiserver.kubelet import Kubelet, wait
from tests.apiserver.operator_process import Operators
from tests.apiserver.server import Server
from tests.support.objects import model, own, policy
from tests.support.redis_binary import needs_redis
from tests.tiers.conftest import connect_to  # noqa: F401  (a fixture)
from tests.tiers.eraser import VALUE, reserve, write
from tests.tiers.redis_process import RedisProcess

pytestmark = needs_redis

NAMESPACE, OPERATOR_NAMESPACE = "team", "kvstrata-system"
MODELS = f"/apis/kvstrata.io/v1alpha1/namespaces/{NAMESPACE}/cachedmodels/tiny"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/kvs-tiny"
JOBS = f"/apis/batch/v1/namespaces/{OPERATOR_NAMESPACE}/jobs"
MERGE = {"Content-Type": "application/merge-patch+json"}
BLOCKS = 40
PATIENCE_S = 240.0


class Place:
    """A namespace with a model on one shared tier and one tenant."""

    kubelet: Kubelet

    def __init__(self, plane: ControlPlane, redis: RedisProcess, folder: Path) -> None:
        self.server, self.redis = Server(plane.kubectl, plane.kubeconfig), redis
        self.api = ApiServer(plane.kubeconfig)
        self.operators = Operators(plane.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, folder)

    @property
    def status(self) -> dict[str, Any]:
        """What the model says."""
        found: dict[str, Any] = self._get(MODELS).get("status") or {}
        return found

    @property
    def phases(self) -> dict[str, str]:
        """Of each former identity, what becomes of it."""
        return {one["identity"]: one["phase"] for one in self.status.get("formerIdentities", ())}

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The Jobs that are there, and are not on their way out."""
        items = self._get(JOBS).get("items", ())
        return [item for item in items if not item["metadata"].get("deletionTimestamp")]

    def declare(self, image: str, **spec: Any) -> str:
        """Give the model another image, wait until the Deployment has it, and roll it out; return the identity."""
        before = self.status.get("identity")
        self.api._call("PATCH", MODELS, {"spec": {"engine": {"image": image}, **spec}}, {}, MERGE)
        self.wait("another identity", lambda: self.status.get("identity") not in (None, before))
        identity = str(self.status["identity"])
        self.wait("its Deployment", lambda: self._labels().get("kvstrata.io/identity") == identity)
        self.roll_out()
        return identity

    def roll_out(self) -> None:
        """Say of the Deployment what its controller does when no pod is wanted."""
        generation = self._get(DEPLOYMENT)["metadata"]["generation"]
        self.api._call("PATCH", f"{DEPLOYMENT}/status", {"status": {"observedGeneration": generation}}, {}, MERGE)

    def keyspace(self) -> tuple[str, str]:
        """The domain's id, and the tenant's keyspace."""
        base = f"/apis/kvstrata.io/v1alpha1/namespaces/{NAMESPACE}"
        scope = self.wait(
            "an epoch", lambda: (self._get(f"{base}/tenantcachepolicies/acme").get("status") or {}).get("scope")
        )
        secret = self._get(f"/api/v1/namespaces/{NAMESPACE}/secrets/kvstrata-domain")
        key = base64.b64decode(secret["data"]["domain.key"])
        domain = self._get(f"{base}/cachedomains/default")["status"]["domainID"]
        return domain, derive_keyspace(key, Scope(ScopeKind.TENANT, "acme"), scope["epoch"])

    def values(self) -> dict[str, int]:
        """How many values the tier has of each identity."""
        found: dict[str, int] = {}
        for name in self.redis.admin().scan_iter(count=1000):
            key = parse_block_key(name.decode())
            if key is not None:
                found[key.identity] = found.get(key.identity, 0) + 1
        return found

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        """Wait until something is so, and return it."""
        try:
            return wait(what, holds, PATIENCE_S)
        except AssertionError as error:
            logs = "\n--\n".join(operator.log_tail() for operator in self.operators.started)
            raise AssertionError(f"{error}\n{self.status}\n{logs}") from error

    def _labels(self) -> dict[str, str]:
        template = (self._get(DEPLOYMENT).get("spec") or {}).get("template") or {}
        labels: dict[str, str] = (template.get("metadata") or {}).get("labels") or {}
        return labels

    def _get(self, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.api.get(path)
        except RefusedError:
            return {}
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    redis = RedisProcess(tmp_path, "--maxmemory", "64mb")
    redis.start()
    with ControlPlane(tmp_path / "control-plane") as plane:
        made = Place(plane, redis, tmp_path)
        install_crds(made.server)
        for namespace in (NAMESPACE, OPERATOR_NAMESPACE):
            made.server.kubectl("create", "namespace", namespace)
        external = {"external": {"endpoints": [f"127.0.0.1:{redis.port}"]}}
        made.server.apply(
            own("CacheTier", "shared", {
                "medium": "Redis", "capacity": "64Mi", "encryption": "Disabled", "redis": external
            })
        )  # fmt: skip
        made.server.apply(model(tiers=("shared",), engine={"image": "engine:1", "replicas": 0}))
        made.server.apply(policy("acme"))
        (tmp_path / "jobs").mkdir()
        node = plane.pki.crt("apiserver"), plane.pki.key("apiserver")
        with Kubelet(made.api._call, OPERATOR_NAMESPACE, *node, tmp_path / "jobs") as made.kubelet:
            try:
                yield made
            finally:
                for operator in made.operators.running():
                    operator.kill()
        made.api.close()
    redis.kill()


def test_a_rollback_finds_what_was_kept_and_what_is_replaced_for_good_is_deleted_whoever_leads(
    place: Place,
    connect_to: Callable[..., Connection],  # noqa: F811
) -> None:
    first = place.operators.start("operator-1")
    first.wait_until_leading(PATIENCE_S)
    old = place.wait("an identity", lambda: place.status.get("identity"))
    place.wait("the Deployment", lambda: place._labels().get("kvstrata.io/identity") == old)
    place.roll_out()
    domain, keyspace = place.keyspace()
    connection = connect_to(place.redis.port)

    def put(identity: str) -> None:
        for number in range(BLOCKS):
            assert connection.ask([reserve(keyspace, number, domain=domain, identity=identity)])[0].outcome is True
            assert write(connection, keyspace, number, domain=domain, identity=identity) == "ok"

    put(old)
    new = place.declare("engine:2")
    place.wait("the window", lambda: place.phases == {old: "Kept"})
    put(new)
    assert place.declare("engine:1") == old
    place.wait("the window of the other", lambda: place.phases == {new: "Kept"})
    assert place.values() == {old: BLOCKS, new: BLOCKS}, "what a rollback goes back to is there"
    assert place.jobs == []

    # The Job ends under the second operator, which counts what was deleted.
    place.kubelet.runs_jobs.clear()
    place.declare("engine:2", rollbackWindow="0s")
    begun = place.wait("a Job that runs", lambda: [job for job in place.jobs if not job["spec"].get("suspend")])
    job = begun[0]["metadata"]["name"]
    first.kill()
    place.kubelet.runs_jobs.set()
    second = place.operators.start("operator-2")
    second.wait_until_leading(PATIENCE_S)
    told = place.wait("what was deleted", lambda: place.status.get("reclaimed"))
    assert (told["identity"], told["blocks"], told["bytes"]) == (old, BLOCKS, BLOCKS * len(VALUE))
    assert job.endswith("-1"), "the Job that the first had begun is the one that counts"
    assert place.values() == {new: BLOCKS}
    place.wait("the end of Jobs", lambda: not place.jobs)
    place.wait("nothing to be said of former identities", lambda: place.phases == {})
    place.wait("the count", lambda: second.metric("kvstrata_reclaimed_blocks_total", model="tiny") == BLOCKS)
    place.wait("no former identity to be counted", lambda: second.metric("kvstrata_former_identities") == 0)
    assert second.process.poll() is None, second.log_tail()

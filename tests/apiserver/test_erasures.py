"""An eager invalidation and the deletion of a policy, from the order to a receipt that verifies: a real API server,
operators of which one is killed, gate processes, the policy adapter, two Redis servers, and deletions as processes.
What was to go is searched for in the memory of all of these processes and in their files, before and after: the receipt
says no more than is found."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.control_plane import ControlPlane
from kvstrata.api.cachedmodel import CachedModel
from kvstrata.cli import plugin
from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.receipt.record import read_receipt
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.receipt.vocabulary import PodMedium
from kvstrata.contract.store.redis_keys import BlockKey, parse_block_key
from kvstrata.objects.pod.identity import render_id
from tests.api.apiserver import ApiServer, RefusedError
from tests.apiserver.conftest import REPOSITORY, install_crds
from tests.apiserver.inference_pod import CHUNK_TOKENS, InferencePod
from tests.apiserver.kubelet import Kubelet, wait
from tests.apiserver.operator_process import Operators
from tests.apiserver.searches import control_plane, folders_with, forms, processes_with
from tests.apiserver.server import Server
from tests.support.objects import cpu_tier, invalidation, model, own, policy
from tests.support.redis_binary import needs_redis
from tests.tiers.redis_process import RedisProcess

pytestmark = needs_redis

NAMESPACE, OPERATOR_NAMESPACE = "team", "kvstrata-system"
INVALIDATION = "cacheinvalidations/leave"
PATIENCE_S = 240.0


class Place:
    """A namespace with a model, two pods, a tier that is encrypted, one that is not, and two tenants."""

    kubelet: Kubelet

    def __init__(self, plane: ControlPlane, redis: RedisProcess, plain: RedisProcess, folder: Path) -> None:
        self.server, self.redis, self.plain = Server(plane.kubectl, plane.kubeconfig), redis, plain
        self._folder = folder
        self.api = ApiServer(plane.kubeconfig)
        self.request = self.api._call
        self.operators = Operators(plane.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, folder)
        # Gates have one port: addresses of this run's own keep it apart from others on the same machine.
        own = f"127.{1 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
        self.pods = [
            InferencePod(self.request, plane.kubeconfig, NAMESPACE, f"tiny-{n}", f"{own}.{n + 2}") for n in (0, 1)
        ]

    def get(self, plural: str, name: str) -> dict[str, Any]:
        """An object of our API."""
        return self.api.get(f"/apis/kvstrata.io/v1alpha1/namespaces/{NAMESPACE}/{plural}/{name}")

    def has(self, what: str) -> bool:
        """Whether the namespace has an object."""
        own = what.startswith(("cache", "tenant"))
        group = "/apis/kvstrata.io/v1alpha1" if own else "/api/v1"
        try:
            return bool(self.api.get(f"{group}/namespaces/{NAMESPACE}/{what}"))
        except RefusedError:
            return False

    def secret(self, name: str) -> dict[str, bytes]:
        """The values of a Secret."""
        raw = self.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")
        return {key: base64.b64decode(value) for key, value in (raw.get("data") or {}).items()}

    def keyspace(self, tenant: str) -> str:
        """A tenant's keyspace now."""
        epoch = self.get("tenantcachepolicies", tenant)["status"]["scope"]["epoch"]
        return derive_keyspace(self.secret("kvstrata-domain")["domain.key"], Scope(ScopeKind.TENANT, tenant), epoch)

    @property
    def status(self) -> dict[str, Any]:
        """What the invalidation says."""
        found: dict[str, Any] = self.get("cacheinvalidations", "leave").get("status") or {}
        return found

    def holds(self) -> set[str]:
        """Its conditions that are true."""
        return {one["type"] for one in self.status.get("conditions", ()) if one["status"] == "True"}

    def enforced(self, tenant: str) -> bool:
        """Whether every pod enforces a policy."""
        return self.condition(tenant, "Enforced")[0] == "True"

    def condition(self, tenant: str, kind: str) -> tuple[str, str]:
        """Status and reason of a condition of a policy."""
        conditions = self.get("tenantcachepolicies", tenant).get("status", {}).get("conditions", ())
        return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))

    def names_with(self, keyspace: str) -> list[bytes]:
        """Names of values in the servers that belong to a keyspace."""
        found = [
            name for one in (self.redis, self.plain) for name in one.admin().scan_iter(f"*{keyspace}*", count=1000)
        ]
        return [name for name in found if not name.endswith(b"#s")]

    def blocks(self, keyspace: str) -> list[str]:
        """Names of blocks in both servers, without what a keyspace is accounted by, which comes and goes by itself."""
        names = (name.decode() for name in self.names_with(keyspace))
        return sorted(name for name in names if parse_block_key(name) is not None)

    def places_of(self, *patterns: bytes) -> set[str]:
        """The processes and folders in which one of the patterns is found; the cache servers' is this process."""
        processes, folders = control_plane(self._folder / "control-plane")
        processes |= {"shared tier": self.redis.pid, "open tier": self.plain.pid}
        processes |= {f"gate of {pod.name}": pod.gate_pid for pod in self.pods}
        processes |= {operator.log.stem: operator.process.pid for operator in self.operators.running()}
        folders |= {f"volumes of {pod.name}": pod.directory for pod in self.pods}
        folders |= {"deletion": self._folder / "jobs"}
        return processes_with(patterns, processes) | folders_with(patterns, folders)

    def data_key(self, tenant: str) -> bytes:
        """The data key of a tenant's epoch now."""
        epoch = self.get("tenantcachepolicies", tenant)["status"]["scope"]["epoch"]
        return next(values[epoch] for values in self._secrets() if epoch in values)

    def copies(self, data_key: bytes) -> int:
        """How many values of Secrets of the namespace have a data key in them."""
        forms = (data_key, base64.b64encode(data_key))
        return sum(any(form in value for form in forms) for values in self._secrets() for value in values.values())

    def _secrets(self) -> list[dict[str, bytes]]:
        items = self.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets")["items"]
        return [{key: base64.b64decode(value) for key, value in (raw.get("data") or {}).items()} for raw in items]

    def jobs(self) -> list[dict[str, Any]]:
        """Deletions that run or have run."""
        items: list[dict[str, Any]] = self.api.get(f"/apis/batch/v1/namespaces/{OPERATOR_NAMESPACE}/jobs")["items"]
        return items

    def kept(self) -> list[str]:
        """What there is in the operator's namespace for erasures that are not over."""
        secrets = self.api.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets")["items"]
        records = [one for one in secrets if one["metadata"]["name"].startswith("kvstrata-erasure-")]
        items = [*records, *self.jobs()]
        return [item["metadata"]["name"] for item in items if not item["metadata"].get("deletionTimestamp")]

    def config_maps(self) -> dict[str, dict[str, str]]:
        """Data of the ConfigMaps in the operator's namespace."""
        items = self.api.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/configmaps")["items"]
        return {item["metadata"]["name"]: item.get("data") or {} for item in items}

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        """Wait until something is so, and return it."""
        try:
            return wait(what, holds, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tails()}") from error

    def tails(self) -> str:
        """What everybody logged last."""
        logs = [operator.log_tail() for operator in self.operators.started] + [pod.log_tail() for pod in self.pods]
        found = self.get("cacheinvalidations", "leave") if self.has(INVALIDATION) else {}
        return "\n--\n".join((json.dumps(found.get("status"), indent=1), *logs))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    redis = RedisProcess(tmp_path, "--maxmemory", "64mb")
    plain = RedisProcess(tmp_path, "--maxmemory", "64mb")
    redis.start()
    plain.start()
    with ControlPlane(tmp_path / "control-plane") as plane:
        made = Place(plane, redis, plain, tmp_path)
        install_crds(made.server)
        for namespace in (NAMESPACE, OPERATOR_NAMESPACE):
            made.server.kubectl("create", "namespace", namespace)
        keys = {"keys.json": base64.b64encode(b'{"keys": []}').decode()}
        made.server.apply(
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": NAMESPACE}, "data": keys}
        )
        for name, server, encryption in (("shared", redis, "Required"), ("open", plain, "Disabled")):
            external = {"external": {"endpoints": [f"127.0.0.1:{server.port}"]}}
            spec = {"medium": "Redis", "capacity": "64Mi", "encryption": encryption, "redis": external}
            made.server.apply(own("CacheTier", name, spec))
        files = {"medium": "NVMe", "capacityPerPod": "64Mi", "nvme": {"emptyDir": {}}}
        for raw in (cpu_tier(), own("CacheTier", "files", files), model(tiers=("cpu", "files", "shared", "open"))):
            made.server.apply(raw)
        for tenant in ("acme", "globex"):
            made.server.apply(policy(tenant))
        (tmp_path / "jobs").mkdir()
        with Kubelet(
            made.request, OPERATOR_NAMESPACE, plane.pki.crt("apiserver"), plane.pki.key("apiserver"), tmp_path / "jobs"
        ) as made.kubelet:
            try:
                yield made
            finally:
                for pod in made.pods:
                    pod.stop()
                for operator in made.operators.running():
                    operator.kill()
        made.api.close()
    redis.kill()
    plain.kill()


def start_pods(place: Place, render_id: str = "") -> str:
    """Start the pods once they have all that they need, wait until they enforce, and return the domain's id."""
    place.wait(
        "what pods need", lambda: place.has("secrets/kvs-tiny-gate-tls") and place.has("serviceaccounts/kvs-tiny")
    )
    domain: str = place.wait(
        "the domain's id", lambda: place.get("cachedomains", "default").get("status", {}).get("domainID")
    )
    for pod in place.pods:
        pod.start(domain, place.redis.port, place.plain.port, render_id)
    place.wait("policies in force", lambda: place.enforced("acme") and place.enforced("globex"))
    return domain


ERASED = ("Unreachable", "KeysRevoked", "Erased", "Verified")


def receipt_of(place: Place, folder: Path, tenant: str = "", claims: tuple[str, ...] = ERASED) -> list[str]:
    """Write the only receipt, or the only one of a tenant, and the key into files; return the words to verify them."""
    stored = place.config_maps()
    receipts = [data["receipt.json"] for name, data in stored.items() if name.startswith("kvstrata-receipt-")]
    (receipt,) = (one for one in receipts if not tenant or f'"{tenant}"' in one)
    (public_key,) = stored["kvstrata-receipts-keys"].values()
    (folder / "receipt.json").write_text(receipt)
    (folder / "key.pem").write_text(public_key)
    needed = [word for claim in claims for word in ("--require", claim)]
    return ["receipt", "verify", str(folder / "receipt.json"), "--public-key", str(folder / "key.pem"), *needed]


def test_what_tenants_have_is_erased_and_receipts_prove_it_although_the_operator_is_killed(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = place.operators.start("operator-a")
    first.wait_until_leading()
    place.operators.start("operator-b")
    place.server.apply(policy("hooli"))
    start_pods(place)
    place.wait("the third policy in force", lambda: place.enforced("hooli"))
    leaving, staying, marker = place.keyspace("acme"), place.keyspace("globex"), os.urandom(16)
    deleted = place.keyspace("hooli")
    for number, pod in enumerate(place.pods):
        pod.store(leaving, 1 + number, 3 + number, content=marker)
        pod.store(staying, 9 + number)
        pod.store(deleted, 5 + number)
    assert place.names_with(leaving)
    assert place.names_with(deleted)
    assert [len(pod.file_names(leaving)) for pod in place.pods] == [2, 2]
    data_key, deleted_key = place.data_key("acme"), place.data_key("hooli")
    assert place.copies(data_key) >= 2
    assert place.copies(deleted_key) >= 2
    assert place.places_of(marker) == {"open tier"}, "the search finds what is there, and nothing of what is encrypted"
    holders = place.places_of(*forms(data_key))
    assert holders >= {first.log.stem, "etcd's files", *(f"gate of {pod.name}" for pod in place.pods)}
    assert holders >= {f"volumes of {pod.name}" for pod in place.pods}

    place.server.apply(invalidation("leave", scope={"tenant": "acme"}, mode="Eager", reason="the contract ended"))
    place.server.kubectl("-n", NAMESPACE, "delete", "tenantcachepolicy", "hooli", "--wait=false")
    place.wait("its access to end", lambda: place.condition("hooli", "Enforced") == ("False", "BeingDeleted"))
    place.wait("the deletion", lambda: place.status.get("phase") == "Erasing")
    first.kill()
    place.wait("the end", lambda: place.status.get("phase") in ("Complete", "Failed"))
    place.wait("the deleted policy to go", lambda: not place.has("tenantcachepolicies/hooli"))

    assert place.status["phase"] == "Complete", place.tails()
    assert place.holds() >= {"LogicallyInvalid", "KeysRevoked", "Erased", "Verified", "Complete", "Ready"}
    assert place.names_with(leaving) == place.names_with(deleted) == []
    assert place.names_with(staying)
    assert place.pods[0].finds(staying, 9) == [1]
    assert [(pod.file_names(leaving), len(pod.file_names(staying))) for pod in place.pods] == [([], 1)] * 2
    assert [pod.file_names(deleted) for pod in place.pods] == [[], []]
    emptied = {tier["name"]: tier["deleted"] for tier in place.status["tiers"]}
    assert (place.status["keys"], emptied) == (8, {"shared": 4, "open": 4})
    assert (place.copies(data_key), place.copies(deleted_key)) == (0, 0)

    for tenant in ("hooli", "acme"):
        assert plugin.main(receipt_of(place, tmp_path, tenant)) == 0, capsys.readouterr()
    receipt = (tmp_path / "receipt.json").read_text()
    assert not any(secret in receipt for secret in (leaving, staying, deleted))
    facts = read_receipt(receipt.encode()).record.erasure
    assert facts is not None
    files = [tier.erased for pod in facts.pods for tier in pod.tiers if tier.medium is PodMedium.NVME]
    assert [(one.found, one.erased, one.remaining) for one in files if one is not None] == [(2, 2, 0)] * 2
    left = {item.kind for item in facts.residue}
    assert {tier.tier: tier.encrypted for tier in facts.tiers} == {"shared": True, "open": False}
    assert place.places_of(marker) <= {"open tier"}
    assert Residue.FREED_STORAGE in left, "what an unencrypted tier freed may hold it"
    found = place.places_of(*forms(data_key))
    assert not found & {"shared tier", "open tier", "deletion", *(f"volumes of {pod.name}" for pod in place.pods)}
    assert "etcd's files" in found
    assert left >= {Residue.ETCD_HISTORY, Residue.ETCD_BACKUPS}
    assert ReceiptClaim.KEYS_DESTROYED not in read_receipt(receipt.encode()).record.claimed
    place.wait(
        "the domain to count its receipts",
        lambda: place.get("cachedomains", "default")["status"].get("receipts", {}).get("count") == 2,
    )
    place.wait("nothing to be kept of it", lambda: not place.kept())
    assert not place.get("cacheinvalidations", "leave")["metadata"].get("finalizers")


def test_what_a_model_has_is_erased_engines_forget_and_a_tenant_of_another_model_keeps_its_own(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.operators.start("operator-a").wait_until_leading()
    for raw in (model("other"), policy("initech", models={"names": ["other"]})):
        place.server.apply(raw)
    domain = start_pods(place)
    going = {tenant: place.keyspace(tenant) for tenant in ("acme", "globex")}
    for number, keyspace in enumerate(going.values()):
        place.pods[number].store(keyspace, 1, 2 + number)
    place.wait("an epoch", lambda: place.get("tenantcachepolicies", "initech").get("status", {}).get("scope"))
    staying = place.keyspace("initech")
    kept = str(BlockKey(domain, staying, "1" * 16, 0, 0, bytes(32)))
    place.redis.admin().set(kept, b"a block under another model")

    place.server.apply(invalidation("leave", scope={"model": "tiny"}, mode="Eager", hbm="ResetEngine"))
    place.wait("the end", lambda: place.status.get("phase") in ("Complete", "Failed"))

    assert place.status["phase"] == "Complete", place.tails()
    assert place.holds() >= {"LogicallyInvalid", "KeysRevoked", "Erased", "Verified", "Complete", "Ready"}
    assert [place.names_with(keyspace) for keyspace in going.values()] == [[], []]
    assert place.names_with(staying) == [kept.encode()]
    assert place.keyspace("initech") == staying
    assert not set(going.values()) & {place.keyspace(tenant) for tenant in going}
    assert all(pod.engine.resets for pod in place.pods), "each at least once: who does not hear an answer asks again"
    assert plugin.main(receipt_of(place, tmp_path)) == 0, capsys.readouterr()
    facts = json.loads((tmp_path / "receipt.json").read_text())["record"]["erasure"]
    assert [bool(pod["engineReset"]) for pod in facts["pods"]] == [True, True]
    assert "EngineMemory" not in {item["kind"] for item in facts["residue"]}
    assert [one["name"] for one in facts["revoked"]] == [None, None]


@pytest.mark.claim(
    "a prefix is erased although the operator is killed, a receipt proves it, and all other blocks are found"
)
def test_of_a_prefix_its_chunks_go_and_a_tenant_has_all_else_again_although_the_operator_is_killed(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.server.apply(model(tiers=("cpu", "files", "shared", "open"), probe={"mode": "Never"}))
    first = place.operators.start("operator-a")
    first.wait_until_leading()
    place.operators.start("operator-b")
    for pod in place.pods:
        pod.engine.serves = True
    start_pods(place, render_id(CachedModel.parse(place.get("cachedmodels", "tiny"))))
    going, staying = place.keyspace("acme"), place.keyspace("globex")
    for number, pod in enumerate(place.pods):
        pod.store(going, 3 + number, 9 + number)
        pod.store(staying, 3 + number)
    theirs = place.blocks(staying)
    assert len(theirs) == 4, "two in each of two tiers"

    tokens = [3] * CHUNK_TOKENS + [4] * CHUNK_TOKENS + [9] * (CHUNK_TOKENS - 1)
    prefix = {"modelRef": {"name": "tiny"}, "content": {"tokenIDs": tokens}, "tenants": ["acme"]}
    place.kubelet.runs_jobs.clear()
    place.server.apply(invalidation("leave", scope={"prefix": prefix}, mode="Eager", hbm="ResetEngine"))
    place.wait("the deletion", lambda: place.status.get("phase") == "Erasing")
    assert place.pods[0].finds(going, 9) == [0], "nobody reuses anything of the scope meanwhile"
    place.wait("a Job that runs", lambda: [job for job in place.jobs() if not job["spec"].get("suspend")])
    first.kill()
    place.kubelet.runs_jobs.set()
    place.wait("the end", lambda: place.status.get("phase") in ("Complete", "Failed"))

    assert place.status["phase"] == "Complete", place.tails()
    assert place.holds() >= {"LogicallyInvalid", "Erased", "Verified", "Complete", "Ready"}
    assert place.status["keys"] == 4, "two chunks in each of two tiers"
    assert place.blocks(staying) == theirs
    assert [(pod.file_names(going), len(pod.file_names(staying))) for pod in place.pods] == [([], 1)] * 2
    assert place.keyspace("acme") == going
    place.wait("all else to be in use again", lambda: place.pods[0].finds(going, 3, 4, 9, 10) == [0, 0, 1, 1])
    assert all(pod.engine.resets for pod in place.pods)
    words = receipt_of(place, tmp_path, claims=("Unreachable", "Erased", "Verified"))
    assert plugin.main(words) == 0, capsys.readouterr()
    facts = json.loads((tmp_path / "receipt.json").read_text())["record"]["erasure"]
    assert [(one["kind"], one["name"], one["new"]) for one in facts["revoked"]] == [("Prefix", "tiny", None)]
    assert facts["keys"] == []

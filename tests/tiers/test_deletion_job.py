"""A deletion as its Job runs it: the rendered container with the rendered order, on a server with TLS and users.

The API server is in memory, and a stand-in plays the kubelet; the program, what it is given and the server are real.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.resources import JOB, SECRET
from kvstrata.contract.messages.erase_report import Erased, totals
from kvstrata.contract.receipt.facts import Amount
from kvstrata.contract.store.redis_keys import BUCKETS
from kvstrata.model.erasure.facts import JobState
from kvstrata.objects import names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.erasure.delete_job import CONTAINER, TierDeletion
from kvstrata.objects.redis.users import DATA_USER, user_rules
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata_sidecar.adapter.params import TlsParams
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from tests.support.job_pod import start_container
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, redis_tier
from tests.support.redis_binary import needs_redis
from tests.tiers.certificates import Authority
from tests.tiers.eraser import VALUE, put
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B
from tests.tiers.redis_process import RedisProcess

pytestmark = needs_redis
CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:7")
WHERE = CONTEXT.operator_namespace
COUNT = 20
WHOLE = Amount(COUNT, COUNT * len(VALUE))
NOTHING = Amount(0, 0)
WINDOW_MS = 31_000
PASSWORD = "the data plane's own"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server as the operator's own are: with TLS, and users who may do what those of managed ones may."""
    (tmp_path / "tls").mkdir()
    authority = Authority(tmp_path / "tls")
    rules = " ".join(user_rules(DATA_USER, DOMAIN, [PASSWORD]))
    (tmp_path / "users.acl").write_text(f"user default on nopass ~* &* +@all\nuser {DATA_USER} {rules}\n")
    found = RedisProcess(
        tmp_path, "--aclfile", str(tmp_path / "users.acl"), tls=authority.issue("127.0.0.1").redis_options
    )
    found.start()
    yield found
    found.kill()


@pytest.fixture
def kube(tmp_path: Path, server: RedisProcess) -> MemoryKube:
    """An API server with the Secrets of the tier."""
    found = MemoryKube()
    keep_secret(found, "auth", password=PASSWORD.encode())
    keep_secret(found, "ca", bundle=(tmp_path / "tls" / "ca.crt").read_bytes())
    return found


def keep_secret(kube: MemoryKube, name: str, **data: bytes) -> None:
    values = {key: base64.b64encode(value).decode() for key, value in data.items()}
    metadata = {"name": name, "namespace": NAMESPACE}
    kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": values})


def order(server: RedisProcess, turn: int = 1, identities: tuple[str, ...] = ()) -> TierDeletion:
    external = {
        "endpoints": [f"127.0.0.1:{server.port}"],
        "tls": {"caSecretRef": {"name": "ca", "key": "bundle"}},
        "username": DATA_USER,
        "authSecretRef": {"name": "auth"},
    }
    raw = redis_tier(redis={"external": external})
    tier = CacheTier.parse({**raw, "metadata": {**raw["metadata"], "uid": "uid-shared"}})
    return TierDeletion("order-1", tier, turn, DOMAIN, 7, (KEYSPACE_A,), identities=identities)


class Cluster:
    """Runs the pods of Jobs, and tells the API server how they ended."""

    def __init__(self, kube: MemoryKube, directory: Path) -> None:
        self.kube, self.directory = kube, directory
        self.jobs = Jobs(kube, CONTEXT, lambda: datetime.now(UTC))

    def start(self, ordered: TierDeletion) -> DeletionRun:
        """Have a Job begin."""
        return asyncio.run(self.jobs.start(ordered))

    def look(self, turn: int = 1) -> DeletionRun:
        """Look how it stands."""
        found = asyncio.run(self.jobs.look("order-1", "shared", turn))
        assert found is not None
        return found

    def run(self, turn: int = 1, until: Callable[[], bool] | None = None) -> int:
        """Run a Job's pod until it ends, or kill it when `until` holds; return its exit code."""
        name = names.deletion_job("order-1", "shared", turn)
        job = self.kube.objects[(JOB.kind, WHERE, name)]
        assert not job["spec"]["suspend"]
        template, folder = job["spec"]["template"], self.directory / name
        folder.mkdir()
        process = start_container(
            template["spec"], lambda secret: self.kube.objects[(SECRET.kind, WHERE, secret)], folder
        )
        give_up_at_s = time.monotonic() + 60
        while until is not None and not until():
            assert process.poll() is None
            assert time.monotonic() < give_up_at_s
            time.sleep(0.002)
        if until is not None:
            process.kill()
        printed, _ = process.communicate(timeout=60)
        self.kube.logs[name] = printed
        self._tell(name, job, template, process.returncode)
        return process.returncode

    def _tell(self, name: str, job: dict[str, Any], template: dict[str, Any], code: int) -> None:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        ended = {"exitCode": code, "reason": "Error", "finishedAt": datetime.now(UTC).isoformat(timespec="seconds")}
        self.kube.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**template["metadata"], "name": name, "namespace": WHERE, "ownerReferences": [owner]},
                "spec": template["spec"],
                "status": {"containerStatuses": [{"name": CONTAINER, "state": {"terminated": ended}}]},
            }
        )


@pytest.fixture
def cluster(kube: MemoryKube, tmp_path: Path) -> Cluster:
    (tmp_path / "pods").mkdir()
    return Cluster(kube, tmp_path / "pods")


@pytest.fixture
def connection(server: RedisProcess, tmp_path: Path, connect_to: Callable[..., Connection]) -> Connection:
    return connect_to(server.port, tls=TlsParams(str(tmp_path / "tls" / "ca.crt"), "127.0.0.1"))


def test_a_job_that_is_killed_and_the_one_after_it_empty_the_tier_and_count_everything(
    server: RedisProcess, connection: Connection, cluster: Cluster
) -> None:
    put(connection, KEYSPACE_A, range(COUNT))
    put(connection, KEYSPACE_B, [1])
    admin = server.admin()
    cluster.start(order(server))
    code = cluster.run(until=lambda: tombstones(admin) == BUCKETS and not values(admin, KEYSPACE_A))
    assert code < 0
    first = cluster.look()
    assert (first.state, first.lines) == (JobState.FAILED, ())
    for name in admin.scan_iter(f"*{KEYSPACE_A}*#s"):
        admin.hincrby(name, "dropped_from", -WINDOW_MS)
    cluster.start(order(server, 2))
    assert cluster.run(2) == 0
    run = cluster.look(2)
    assert (run.state, run.problem) == (JobState.DONE, "")
    rows = [line for line in run.lines if isinstance(line, Erased)]
    assert [row.keyspace for row in rows] == [None]
    assert totals(rows, rows[0].node) == (WHOLE, WHOLE, NOTHING)
    assert not values(admin, KEYSPACE_A)
    assert values(admin, KEYSPACE_B)


def test_nothing_that_it_prints_is_a_secret_or_a_keyspace(
    server: RedisProcess, connection: Connection, cluster: Cluster
) -> None:
    put(connection, KEYSPACE_A, [1])
    cluster.start(order(server))
    cluster.run(until=lambda: tombstones(server.admin()) == BUCKETS)
    for name in server.admin().scan_iter(f"*{KEYSPACE_A}*#s"):
        server.admin().hincrby(name, "dropped_from", -WINDOW_MS)
    cluster.start(order(server, 2))
    cluster.run(2)
    printed = b"".join(cluster.kube.logs.values()).decode()
    assert printed
    assert not [text for text in (PASSWORD, KEYSPACE_A, "BEGIN CERTIFICATE") if text in printed]


def test_a_job_of_an_identity_deletes_that_alone_with_the_rights_of_pods(
    server: RedisProcess, connection: Connection, cluster: Cluster
) -> None:
    put(connection, KEYSPACE_A, range(COUNT))
    put(connection, KEYSPACE_A, range(COUNT), identity="f" * 16)
    cluster.start(order(server, identities=("f" * 16,)))
    assert cluster.run() == 0
    run = cluster.look()
    assert (run.state, run.problem) == (JobState.DONE, "")
    rows = [line for line in run.lines if isinstance(line, Erased)]
    assert totals(rows, rows[0].node) == (WHOLE, WHOLE, NOTHING)
    assert len(values(server.admin(), KEYSPACE_A)) == COUNT
    assert tombstones(server.admin()) == 0


def test_a_server_that_is_away_is_waited_for(server: RedisProcess, cluster: Cluster) -> None:
    server.kill()
    cluster.start(order(server))
    assert cluster.run() == 3
    run = cluster.look()
    assert run.state is JobState.FAILED
    assert run.problem.startswith(f"ServerAway: 127.0.0.1:{server.port}")


def test_a_password_that_was_changed_in_the_secret_is_used_by_the_next_job(
    server: RedisProcess, cluster: Cluster, kube: MemoryKube
) -> None:
    keep_secret(kube, "auth", password=b"another one")
    cluster.start(order(server))
    assert cluster.run() == 3
    assert cluster.look().problem.startswith("AccessRefused: ")
    keep_secret(kube, "auth", password=PASSWORD.encode())
    cluster.start(order(server, 2))
    cluster.run(2, until=lambda: tombstones(server.admin()) == BUCKETS)


def test_another_authority_than_the_servers_is_refused_before_the_password_is_sent(
    server: RedisProcess, cluster: Cluster, kube: MemoryKube, tmp_path: Path
) -> None:
    (tmp_path / "others").mkdir()
    keep_secret(kube, "ca", bundle=Authority(tmp_path / "others").file.read_bytes())
    cluster.start(order(server))
    assert cluster.run() == 3
    assert "certificate" in cluster.look().problem.lower()
    assert server.admin().acl_log() == []


def tombstones(admin: Any) -> int:
    return sum(admin.hexists(name, "tombstone") for name in admin.scan_iter("*#s"))


def values(admin: Any, keyspace: str) -> list[bytes]:
    return [name for name in admin.scan_iter(f"*{keyspace}*") if b":#" not in name]

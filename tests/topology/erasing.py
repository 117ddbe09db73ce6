"""A managed cluster of real servers from which a tenant is erased: the operator's own plans, loop and runner.

The API server is in memory, and so are the pods of the model, whose gates say what tests have them say. The servers of
the tier are real (`rig`), tended by the product. Deletions are its program, as Jobs would run it; looks are its own.
Time is a simulation's, but for what servers and programs need.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.scalars import format_timestamp
from kvstrata.clients.redis.probe import Access
from kvstrata.clients.redis.verifier import TierVerifier
from kvstrata.clients.resources import JOB, SECRET
from kvstrata.objects import names
from kvstrata.objects.erasure.delete_job import CONTAINER, ORDER_FILE
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, USERS, users_acl
from kvstrata.objects.tier_link import redis_link
from kvstrata.plan.actions import ReconcileCluster
from kvstrata.plan.redis.topology.view import count
from kvstrata.reconcile.erasure.deps import ErasureDeps
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.erasure.tiers import Looks
from kvstrata.reconcile.redis.topology import Topologies
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.commands import read_number
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.resp import Command
from kvstrata_sidecar.adapter.redis.client.slots import Address
from tests.support.job_pod import start_container
from tests.support.objects import NAMESPACE
from tests.support.worlds import CONTEXT, Simulation
from tests.tiers.eraser import name_of, reserve, write
from tests.topology.rig import TESTER, Patience, Rig
from tests.unit.reconcile.erasing import KIND, OPERATOR_NAMESPACE, World

TIER = "shared"
WINDOW_MS = 6_000
"""For how long a deletion waits for late values: long enough for something to happen meanwhile."""
TICK_S = 0.5
PAUSE_S = 0.01


class Port(Topologies):
    """The product's loop, told of the port that the pods of a rig have."""

    port = 0

    def tend(self, namespace: str, order: ReconcileCluster) -> None:
        super().tend(namespace, replace(order, port=self.port))


class ClusterWorld(World):
    """What is needed to erase from the servers of a rig, which has not started yet. Enter it within an event loop.

    Jobs' pods start as long as `jobs_may_start`.
    """

    def __init__(self, sim: Simulation, rig: Rig, directory: Path) -> None:
        super().__init__(sim)
        self.rig, self._directory = rig, directory
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self.jobs_may_start = True
        self.domain = sim.world.domain_id or ""
        self._topologies = Port(sim.kube, sim.store, sim.queue, lambda: self.leading)
        self._topologies.port = rig.port
        link = redis_link(self.tier)
        assert link is not None
        passwords = {user: [user] for user in USERS}
        for user, where in ((DATA_USER, link.password), (ADMIN_USER, link.operator_password)):
            assert where is not None
            passwords[user].append(self._secret(*where).decode())
        rig._acl.write_bytes(users_acl(self.domain, passwords) + TESTER)
        self._password = directory / "tester"
        self._password.write_text("tester")

    async def __aenter__(self) -> ClusterWorld:
        self.sim.topologies = self._topologies
        self.sim.tend = lambda order: self._topologies.tend(NAMESPACE, order)
        await self._topologies.__aenter__()
        self.rig.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._topologies.__aexit__(None, None, None)
        for program in self._programs.values():
            program.kill()
            program.communicate()

    @property
    def status(self) -> dict[str, Any]:
        """What the invalidation says; nothing before there is one."""
        known = (KIND, NAMESPACE, "leave") in self.sim.kube.objects
        return super().status if known else {}

    @property
    def tier(self) -> CacheTier:
        """The tier as the operator has it."""
        return self.sim.world.tiers[TIER]

    @property
    def progress(self) -> str:
        """What the tier says of what is to be done with its servers."""
        return str(self.sim.status("CacheTier", TIER).get("progress") or "")

    @property
    def jobs_begun(self) -> int:
        """How many Jobs run or ran."""
        return len(self._programs) + len(self.sim.kube.logs)

    def deps(self) -> ErasureDeps:
        """Everybody whom the operator knows, with its own looks and Jobs."""
        deps = super().deps()

        def verifier(endpoint: str, server_name: str, access: Access, *, cluster: bool) -> TierVerifier:
            pod = next(pod for pod in self.rig.pods.values() if pod.ready)
            return TierVerifier(f"{pod.ip}:{self.rig.port}", server_name, access, cluster=cluster)

        looks = Looks(self.sim.kube, "operator-1", deps.now, verifier)
        jobs = Jobs(self.sim.kube, CONTEXT, deps.now)
        return replace(deps, looks=looks, jobs=jobs, sleep=lambda _: asyncio.sleep(PAUSE_S))

    async def turn(self, seconds: float = 0.0) -> None:
        """Show what Kubernetes would show, and let everybody do what there is to be done."""
        self._show_servers()
        self._run_jobs()
        await super().turn(seconds)
        await asyncio.sleep(PAUSE_S)

    async def until(self, condition: Callable[[], object], tick_s: float = TICK_S, turns: int = 0) -> None:
        """Let time pass until `condition` holds, for as long as anything new is heard."""
        patience = Patience()
        while not condition():
            await self.turn(tick_s)
            patience.ask((self.status.get("message"), self.progress, self.jobs_begun))

    def slots(self, shard: int) -> int:
        """How many slots a shard has, as far as the operator has seen."""
        report = self.sim.world.clusters.get(TIER)
        servers = report.cluster.servers.items() if report is not None and report.cluster is not None else ()
        own = [one for uid, one in servers if (pod := self.rig.pods.get(uid)) is not None and pod.shard == shard]
        return sum(count(one.itself.slots) for one in own)

    # What is in the servers

    def store(self, keyspace: str, count: int) -> None:
        """Store blocks as a pod does, where their slots are, and have replicas confirm them."""
        with self._client() as client:
            owners = [client.get_node_from_key(name_of(keyspace, number, self.domain)[0]) for number in range(count)]
            links = {owner.host: self._dial(owner.host) for owner in owners}
            for number, owner in enumerate(owners):
                link = links[owner.host]
                assert link.ask([reserve(keyspace, number, domain=self.domain)])[0].outcome is True
                assert write(link, keyspace, number, domain=self.domain) == "ok"
            for link in links.values():
                confirmed = Command(b"", (b"WAIT", b"1", b"10000"), read_number)
                assert link.ask([confirmed]) == [1]
                link.close()

    def values(self, keyspace: str) -> int:
        """How many values of a keyspace there are, on replicas, too."""
        found = 0
        for pod in self.rig.pods.values():
            with self.rig.client(pod) as client:
                found += sum("#" not in name for name in client.scan_iter(f"*{keyspace}*", count=1000))
        return found

    def tombstones(self, keyspace: str) -> int:
        """How many buckets of a keyspace have a tombstone, on primaries."""
        found = 0
        for pod in self.rig.pods.values():
            with self.rig.client(pod) as client:
                if client.role()[0] == "master":
                    names = client.scan_iter(f"*{keyspace}*#s", count=1000)
                    found += sum(client.hexists(name, "tombstone") for name in names)
        return found

    def _dial(self, host: str) -> Connection:
        timeouts = {"connect_timeout_ms": 10_000, "io_timeout_ms": 20_000}
        tier = TierParams("shared", username="tester", password_file=str(self._password), **timeouts)
        return dial(Address(host, self.rig.port), tier)

    def _client(self) -> Any:
        pod = next(pod for pod in self.rig.pods.values() if pod.ready)
        return redis.RedisCluster(
            host=str(pod.ip), port=self.rig.port, username="tester", password="tester",
        )  # fmt: skip

    # What Kubernetes does

    def _show_servers(self) -> None:
        """Show the tier's pods; they are ready when their servers answer."""
        report = self.sim.store.domain(NAMESPACE).clusters.get(TIER)
        if report is not None and report.cluster is not None:
            self.rig.probe(report.cluster)
        shown = [
            replace(pod, name=f"{names.redis_shard(TIER, pod.shard)}-{pod.ordinal}") for pod in self.rig.pods.values()
        ]
        servers = {pod.name: pod for pod in shown}
        domain = self.sim.store.domain(NAMESPACE)
        if domain.servers.get(TIER) != servers:
            domain.servers[TIER] = servers
            self.sim.enqueue_all()

    def _run_jobs(self) -> None:
        """Run the pods of Jobs, and tell how they ended."""
        kube = self.sim.kube
        jobs = [
            raw for (kind, where, _), raw in kube.objects.items() if (kind, where) == (JOB.kind, OPERATOR_NAMESPACE)
        ]
        for job in jobs:
            name, template = job["metadata"]["name"], job["spec"]["template"]
            known = name in self._programs or name in kube.logs
            if self.jobs_may_start and not job["spec"]["suspend"] and not known:
                folder = self._directory / name
                folder.mkdir()
                self._programs[name] = start_container(template["spec"], self._mounted, folder)
            program = self._programs.get(name)
            if program is not None and program.poll() is not None:
                kube.logs[name], _ = program.communicate()
                del self._programs[name]
                self._tell_ended(job, program.returncode)

    def _tell_ended(self, job: dict[str, Any], code: int) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
        ended["finishedAt"] = format_timestamp(self.sim.now)
        told = {"name": CONTAINER, "state": {"terminated": ended}}
        self.sim.kube.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    **template["metadata"], "name": name, "namespace": OPERATOR_NAMESPACE, "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"containerStatuses": [told]},
            }
        )  # fmt: skip

    def _mounted(self, name: str) -> dict[str, Any]:
        """Return the Secret of a Job, with addresses in place of names that only a cluster's DNS knows."""
        raw = self.sim.kube.objects[(SECRET.kind, OPERATOR_NAMESPACE, name)]
        order = json.loads(base64.b64decode(raw["data"][ORDER_FILE]))
        ready = [pod for pod in self.rig.pods.values() if pod.ready]
        order["tier"]["endpoints"] = [{"host": str(pod.ip), "port": self.rig.port} for pod in ready]
        data = raw["data"] | {
            ORDER_FILE: base64.b64encode(json.dumps(order | {"window_ms": WINDOW_MS}).encode()).decode()
        }
        return raw | {"data": data}

    def _secret(self, name: str, key: str) -> bytes:
        return base64.b64decode(self.sim.kube.objects[(SECRET.kind, NAMESPACE, name)]["data"][key])

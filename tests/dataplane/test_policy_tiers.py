"""Redis tiers join and leave a real LMCache server, whose process and memory stay, while an engine reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.policy.tiers import ACCESS_DIRECTORY, Server, TierRules
from tests.dataplane.conftest import StartServer
from tests.dataplane.fresh import CHUNKS, fresh_keyspace, fresh_sequence, until
from tests.dataplane.lmcache_server import LMCacheServer
from tests.tiers.gate_stand_in import GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]

PASSWORD = "tier-password"


@dataclass
class Pod:
    """A cache container with memory and no tier in its arguments, and two Redis servers."""

    server: LMCacheServer
    gate: GateStandIn
    redis: dict[str, RedisProcess]
    keyspace: str

    def use(self, *names: str) -> list[str]:
        """Put a policy with these tiers in force; return the tiers that the pod reports."""
        tiers = (
            TierRules(name, (Server("127.0.0.1", self.redis[name].port),), 64 << 20, password=True) for name in names
        )
        self.gate.enforce({self.keyspace: ()}, tiers=tuple(tiers))
        return [tier.name for tier in self.gate.state().tiers if tier.medium == "Redis"]

    def count(self, name: str) -> int:
        return self.gate.state().counters.get(name, 0)

    def clients(self, name: str) -> int:
        """How many connections the server has, besides this test's."""
        clients = self.redis[name].admin(PASSWORD).client_list()
        return sum(not one["addr"].startswith("/") and not one["addr"].endswith(":0") for one in clients)

    def wait_for(self, name: str) -> None:
        until(lambda: any(tier.name == name and tier.breaker == "closed" for tier in self.gate.state().tiers))


@pytest.fixture(scope="module")
def pod(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    directory = tmp_path_factory.mktemp("pod")
    gate, servers = GateStandIn(directory), dict[str, RedisProcess]()
    access = gate.policy_dir / ACCESS_DIRECTORY
    access.mkdir()
    for name in ("near", "far"):
        (directory / name).mkdir()
        servers[name] = RedisProcess(directory / name, "--requirepass", PASSWORD)
        servers[name].start()
        (access / f"{name}.password").write_text(PASSWORD)
    server = start_server(directory, gate, [None], memory={"tier": "dram"})
    yield Pod(server, gate, servers, fresh_keyspace())
    for one in servers.values():
        one.kill()


def test_a_tier_comes_and_goes_while_the_server_and_its_memory_stay(pod: Pod) -> None:
    before, after = fresh_sequence(), fresh_sequence()
    assert pod.use() == []
    boot, process = pod.gate.state().boot, pod.server.process.pid
    assert pod.server.store(before, pod.keyspace, 3)["stored"]

    assert pod.use("near") == ["near"]
    pod.wait_for("near")
    assert pod.server.read(before, pod.keyspace)["values"] == [3.0], "memory stayed"
    assert pod.server.store(after, pod.keyspace, 5)["stored"]
    until(lambda: pod.count("near.stored") >= CHUNKS)
    pod.server.forget_memory()
    until(lambda: pod.server.lookup(after, pod.keyspace)["hits"] == CHUNKS)  # a lookup has a deadline
    assert pod.server.read(after, pod.keyspace)["values"] == [5.0]

    assert pod.use() == []
    until(lambda: pod.clients("near") == 0)
    assert pod.server.read(after, pod.keyspace)["values"] == [5.0]
    assert (pod.gate.state().boot, pod.server.process.pid) == (boot, process)
    assert pod.server.get("/healthcheck")


def test_tiers_are_asked_in_the_policys_order(pod: Pod) -> None:
    assert pod.use("near", "far") == ["near", "far"]
    assert pod.use("far", "near") == ["far", "near"]
    adapters = pod.server.get("/status")["storage_manager"]["l2_adapters"]
    assert [one["tier"] for one in adapters] == [None, "far", "near"]
    assert pod.use("near") == ["near"]


def test_an_engine_reads_on_while_tiers_come_and_go(pod: Pod) -> None:
    sequence, stop, read = fresh_sequence(), threading.Event(), list[object]()
    pod.use()
    assert pod.server.store(sequence, pod.keyspace, 9)["stored"]

    def reads() -> None:
        while not stop.is_set():
            read.append(pod.server.read(sequence, pod.keyspace)["values"])

    engine = threading.Thread(target=reads)
    engine.start()
    try:
        for names in (("near",), ("near", "far"), ("far",), ()) * 3:
            assert pod.use(*names) == list(names)
    finally:
        stop.set()
        engine.join()
    assert read
    assert all(values == [9.0] for values in read)


def has_left(pod: Pod) -> bool:
    try:
        return pod.use() == []
    except ContractError:
        return False  # the gate asks again


def test_a_tier_whose_server_hangs_is_left(pod: Pod) -> None:
    sequence = fresh_sequence()
    pod.use("far")
    pod.wait_for("far")
    pod.redis["far"].freeze()
    try:
        assert pod.server.store(sequence, pod.keyspace, 4)["stored"]
        until(lambda: has_left(pod))
        assert pod.server.read(sequence, pod.keyspace)["values"] == [4.0]
    finally:
        pod.redis["far"].thaw()

"""What was recorded of real servers, read (`record_answers` recorded it)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.clients.redis.node_answers import NotAnAnswerError, by_name, parse_nodes, parse_server
from kvstrata.model.redis.cluster import SLOTS, Server, SlotJob
from kvstrata.plan.redis.topology.view import count

pytestmark = pytest.mark.claim("what each kind of server says of itself and of its peers is read as it is meant")

ANSWERS = Path(__file__).parent / "answers"
KINDS = {
    "redis-7.0": ("Redis", "7.0."),
    "redis-8.0": ("Redis", "8.0."),
    "redis-8.2": ("Redis", "8.2."),
    "valkey-8.1": ("Valkey", "8.1."),
    "valkey-9.1": ("Valkey", "9.1."),
}

Read = Callable[[str], Server]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def read(kind: str) -> Read:
    recorded = json.loads((ANSWERS / f"{kind}.json").read_text())

    def read(situation: str) -> Server:
        found = recorded[situation]
        texts = (found["CLUSTER NODES"], found["INFO server"], found["CLUSTER INFO"])
        timeout = dict([found["CONFIG GET"]])["cluster-node-timeout"]
        return parse_server("uid", *texts, int(timeout), found["CLUSTER GETSLOTMIGRATIONS"])

    return read


def test_a_server_that_knows_nobody(read: Read, kind: str) -> None:
    server = read("fresh")
    assert (server.software, server.version[:4]) == KINDS[kind]
    assert [peer.node_id for peer in server.peers] == [server.node_id]
    assert (server.is_primary, server.cluster_ok, server.keys, server.current_epoch) == (True, False, 0, 0)
    assert (server.itself.slots, server.itself.epoch, server.itself.primary) == ((), 0, None)
    assert server.itself.ip.startswith("127.")
    assert server.node_timeout_ms == 1500
    assert server.max_bytes == 32 << 20
    assert server.used_bytes > 100_000
    assert server.moves_atomically == (kind == "valkey-9.1")


def test_a_primary_with_a_slot_that_leaves(read: Read) -> None:
    server = read("primary")
    assert server.itself.slots == ((0, 5460),)
    assert list(server.itself.migrating) == [5]
    (target,) = [peer for peer in server.peers if peer.node_id == server.itself.migrating[5]]
    assert target.slots == ((5461, 10921),)
    assert (server.cluster_ok, server.is_primary, server.keys > 0) == (True, True, True)
    assert sum(count(peer.slots) for peer in server.peers) == SLOTS
    assert all(peer.linked and not peer.failed and not peer.suspected for peer in server.peers)
    assert len({peer.epoch for peer in server.peers if peer.is_primary}) == 3


def test_a_primary_with_a_slot_that_comes(read: Read) -> None:
    assert read("importing").itself.importing == {5: read("primary").node_id}


def test_a_replica_in_step(read: Read) -> None:
    server = read("replica")
    assert (server.is_primary, server.link_up, server.ever_synced, server.syncing) == (False, True, True, False)
    assert server.itself.primary == read("primary").node_id
    assert server.offset > 0


def test_of_one_that_does_not_answer_first_one_thinks_so_and_then_all(read: Read) -> None:
    suspected = [peer for peer in read("suspecting").peers if peer.suspected]
    assert suspected
    failed = [peer for peer in read("failed").peers if peer.failed]
    assert not any(peer.linked or peer.suspected for peer in failed)
    assert any(count(peer.slots) == 5462 for peer in failed)


def test_one_whose_address_another_has_now_has_none(read: Read) -> None:
    (found,) = [peer for peer in read("no address").peers if peer.no_address]
    assert (found.ip, found.port) == ("", 0)


def test_atomic_migrations() -> None:
    found = json.loads((ANSWERS / "valkey-9.1.json").read_text())["migrated"]["CLUSTER GETSLOTMIGRATIONS"]
    text = json.loads((ANSWERS / "valkey-9.1.json").read_text())["migrated"]

    def jobs(**changes: str) -> tuple[SlotJob, ...]:
        entries = [by_name(entry) | changes for entry in found]
        return parse_server("uid", text["CLUSTER NODES"], text["INFO server"], text["CLUSTER INFO"], 1, entries).jobs

    assert jobs() == (), "it is over"
    (job,) = jobs(state="snapshotting")
    assert job.slots == ((7, 9), (11, 11))
    assert len(job.target) == 40
    assert jobs(state="snapshotting", operation="IMPORT") == (), "its source reports it"


@pytest.mark.parametrize("handshake", [True, False])
def test_addresses_of_all_forms(handshake: bool) -> None:
    flags = "handshake" if handshake else "slave"
    lines = [
        f"{'a' * 40} 10.0.0.7:6379@16379,pod-0.redis.ns.svc {flags} {'b' * 40} 0 0 3 connected",
        f"{'b' * 40} fd00::7:6379@16379,,shard-id=1,nodename=x myself,master - 0 0 3 connected 0-5 7 [8->-{'a' * 40}]",
    ]
    first, second = parse_nodes("\n".join(lines) + "\n")
    assert (first.ip, first.port, first.hostname) == ("10.0.0.7", 6379, "pod-0.redis.ns.svc")
    assert (first.handshake, first.primary) == (handshake, "b" * 40)
    assert (second.ip, second.hostname, second.slots) == ("fd00::7", "", ((0, 5), (7, 7)))
    assert second.migrating == {8: "a" * 40}


@pytest.mark.parametrize("text", ["", "hello", "a b c", "a 10.0.0.1:x@1 myself,master - 0 0 0 connected"])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(NotAnAnswerError):
        parse_server("uid", text, "", "", 1, None)

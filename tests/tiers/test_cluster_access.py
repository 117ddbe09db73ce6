"""Who is believed: servers that prove themselves, by address or announced name, and credentials that change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.contract.store.redis_scripts import COMMANDS
from kvstrata_sidecar.adapter.params import TlsParams
from tests.tiers.certificates import Authority
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, GateStandIn
from tests.tiers.redis_cluster import PATIENT_MS, ClusterNode, RedisCluster, raw, text, until
from tests.tiers.redis_process import RedisProcess
from tests.tiers.tier_driver import Driver, block
from tests.tiers.tier_on_cluster import BLOCKS, all_closed, begin, load_right, node_of, slot_of_bucket, store_all

pytestmark = pytest.mark.redis
Start = Callable[..., Driver]

RIGHTS = ["on", f"~{domain_pattern(DOMAIN)}", "resetchannels", "-@all", *(f"+{command}" for command in COMMANDS)]


def let_in(server: RedisProcess, *passwords: str) -> None:
    """Make the data user, with the rights that the operator gives it, have these passwords and no others."""
    words = [f">{password}" for password in passwords]
    server.admin().execute_command("ACL", "SETUSER", "data", "resetpass", *words, *RIGHTS)


def credentials(tmp_path: Path) -> dict[str, str]:
    return {"username": "data", "password_file": str(tmp_path / "password")}


def misses_until_told(driver: Driver, why: str) -> None:
    """Look a block up, which is a miss each time, until the tier says why no server lets it in."""

    def gives_the_reason() -> bool:
        assert driver.lookup([block(KEYSPACE_A)]) == [0]
        state = driver.tier.state()
        return state.breaker != "closed" and why in state.detail

    until(gives_the_reason, driver.tier.state)


class TestNames:
    def test_servers_are_found_by_the_names_that_they_announce(
        self, start: Start, gate: GateStandIn, tmp_path: Path
    ) -> None:
        names = ["--cluster-announce-hostname", "localhost", "--cluster-preferred-endpoint-type", "hostname"]
        cluster = RedisCluster(tmp_path, options=lambda _: names, node_timeout_ms=PATIENT_MS)
        cluster.start()
        driver = begin(start, gate, cluster)
        assert store_all(driver) == len(BLOCKS)
        assert load_right(driver) == [1] * len(BLOCKS)
        assert all(name.startswith("localhost:") for name in driver.tier.nodes())
        source = node_of(cluster, 0)
        cluster.move(slot_of_bucket(0), source, next(one for one in cluster.primaries if one is not source))
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        cluster.kill()

    def test_over_tls_each_server_has_to_prove_the_name_that_it_announces(
        self, start: Start, gate: GateStandIn, tmp_path: Path
    ) -> None:
        authority = Authority(tmp_path)
        # The third proves a name that is not the one it announces.
        proven = [["one.tier.internal", "127.0.0.1"], ["two.tier.internal"], ["four.tier.internal"]]
        files = [authority.issue(*names, stem=f"tls-{n}").redis_options for n, names in enumerate(proven)]
        announced = ["one.tier.internal", "two.tier.internal", "three.tier.internal"]
        cluster = RedisCluster(
            tmp_path,
            options=lambda n: ["--cluster-announce-hostname", announced[n]],
            tls=lambda n: files[n],
            node_timeout_ms=PATIENT_MS,
        )
        cluster.start()
        (tmp_path / "password").write_text("secret\n")
        for node in cluster.nodes:
            let_in(node, "secret")
        driver = start(cluster.nodes[0].port, cluster=True, tls=TlsParams(str(authority.file)), **credentials(tmp_path))
        gate.allow(KEYSPACE_A)
        until(lambda: driver.tier.state().nodes == 3 and driver.tier.state().nodes_away == 1, driver.tier.state)
        until(lambda: "not trusted" in driver.tier.state().detail, driver.tier.state)
        third = cluster.nodes[2]
        there = [one for one in BLOCKS if node_of(cluster, one.chunk_hash[0]) is not third]
        assert store_all(driver) == len(there) > 0
        assert load_right(driver, there) == [1] * len(there)
        assert "cmdstat_auth:" not in text(raw(third, "INFO", "commandstats")), "it never saw the password"
        cluster.kill()

    def test_one_name_for_all_servers_needs_no_announced_ones(
        self, start: Start, gate: GateStandIn, tmp_path: Path
    ) -> None:
        authority = Authority(tmp_path)
        files = authority.issue("tier.internal").redis_options
        cluster = RedisCluster(tmp_path, tls=lambda _: files, node_timeout_ms=PATIENT_MS)
        cluster.start()
        driver = begin(start, gate, cluster, tls=TlsParams(str(authority.file), "tier.internal"))
        assert store_all(driver) == len(BLOCKS)
        assert load_right(driver) == [1] * len(BLOCKS)
        source = node_of(cluster, 0)
        cluster.move(slot_of_bucket(0), source, next(one for one in cluster.primaries if one is not source))
        assert load_right(driver) == [1] * len(BLOCKS)
        cluster.kill()

    def test_a_server_of_another_authority_that_is_given_slots_never_sees_the_password(
        self, start: Start, gate: GateStandIn, tmp_path: Path
    ) -> None:
        (tmp_path / "other").mkdir()
        ours, theirs = Authority(tmp_path), Authority(tmp_path / "other")
        both = tmp_path / "both.crt"
        both.write_bytes(ours.file.read_bytes() + theirs.file.read_bytes())

        def trusting_both(options: list[str]) -> list[str]:
            return [str(both) if word in (str(ours.file), str(theirs.file)) else word for word in options]

        mine = trusting_both(ours.issue("127.0.0.1").redis_options)
        cluster = RedisCluster(tmp_path, tls=lambda _: mine, node_timeout_ms=PATIENT_MS)
        cluster.start()
        (tmp_path / "password").write_text("secret\n")
        for node in cluster.nodes:
            let_in(node, "secret")
        driver = begin(start, gate, cluster, tls=TlsParams(str(ours.file)), **credentials(tmp_path))
        store_all(driver)
        stranger = cluster.add(tmp_path / "other", tls=trusting_both(theirs.issue("127.0.0.1").redis_options))
        let_in(stranger, "secret")
        cluster.move(slot_of_bucket(0), node_of(cluster, 0), stranger)
        lost = [block(KEYSPACE_A, number) for number in range(16)]
        kept = [one for one in BLOCKS if node_of(cluster, one.chunk_hash[0]) is not stranger]
        for _ in range(5):
            assert driver.lookup(lost) == [0] * 16
            assert load_right(driver, kept) == [1] * len(kept)
        until(lambda: "not trusted" in driver.tier.state().detail, driver.tier.state)
        assert "cmdstat_auth:" not in text(raw(stranger, "INFO", "commandstats"))
        cluster.kill()


class TestCredentialsChange:
    def test_a_password_that_was_changed_everywhere_is_used_without_a_restart_and_without_a_miss(
        self, start: Start, gate: GateStandIn, tmp_path: Path
    ) -> None:
        cluster = RedisCluster(tmp_path, node_timeout_ms=PATIENT_MS)
        cluster.start()
        (tmp_path / "password").write_text("first\n")
        for node in cluster.nodes:
            let_in(node, "first")
        driver = begin(start, gate, cluster, **credentials(tmp_path))
        assert store_all(driver) == len(BLOCKS)
        for node in cluster.nodes:
            let_in(node, "first", "second")
        (tmp_path / "password").write_text("second\n")
        for node in cluster.nodes:
            let_in(node, "second")
        assert load_right(driver) == [1] * len(BLOCKS)
        for node in cluster.nodes:
            node.ask("CLIENT", "KILL", "USER", "data")
        assert load_right(driver) == [1] * len(BLOCKS)
        assert driver.lookup(BLOCKS) == [1] * len(BLOCKS)
        assert driver.tier.state().errors == 0
        cluster.kill()

    def test_a_user_that_was_deleted_and_made_anew_costs_misses_until_the_file_follows(
        self, start: Start, gate: GateStandIn, redis_server: RedisProcess, tmp_path: Path
    ) -> None:
        let_in(redis_server, "first")
        (tmp_path / "password").write_text("first\n")
        driver = start(redis_server.port, **credentials(tmp_path))
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        assert driver.store([block(KEYSPACE_A)]).stored_bytes > 0
        redis_server.admin().execute_command("ACL", "DELUSER", "data")
        let_in(redis_server, "second")
        misses_until_told(driver, "WRONGPASS")
        (tmp_path / "password").write_text("second\n")
        driver.until("closed")
        assert driver.lookup([block(KEYSPACE_A)]) == [1]


def test_the_rights_that_the_operator_gives_are_enough_for_a_cluster(
    start: Start, gate: GateStandIn, tmp_path: Path
) -> None:
    cluster = RedisCluster(tmp_path, node_timeout_ms=PATIENT_MS)
    cluster.start()
    (tmp_path / "password").write_text("secret")
    for node in cluster.nodes:
        let_in(node, "secret")
    driver = begin(start, gate, cluster, **credentials(tmp_path))
    slot, source = slot_of_bucket(0), node_of(cluster, 0)
    target: ClusterNode = next(one for one in cluster.primaries if one is not source)
    store_all(driver)
    cluster.begin_move(slot, source, target)
    cluster.move_keys(slot, source, target, 3)
    assert load_right(driver) == [1] * len(BLOCKS)
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, target)
    driver.tier.delete(BLOCKS)
    assert store_all(driver) == len(BLOCKS)
    assert driver.tier.state().errors == 0
    all_closed(driver, 3)
    cluster.kill()

"""Servers with a tier over TLS beside a plain one, and with none: one link, one policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.contract.store.redis_scripts import COMMANDS
from tests.dataplane.conftest import PATIENT, StartServer, tier
from tests.dataplane.fresh import until
from tests.tiers.certificates import SERVER_NAME, issue
from tests.tiers.gate_stand_in import DOMAIN, KEYSPACE_A, KEYSPACE_B, GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = [pytest.mark.lmcache, pytest.mark.redis]
CHUNKS = 4

RULES = [f"+{command}" for command in COMMANDS]
"""All that the adapter's user needs to be allowed."""


def test_two_tiers_share_one_policy_and_either_can_serve(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain, secured = RedisProcess(tmp_path / "plain"), RedisProcess(tmp_path, tls=issue(tmp_path).redis_options)
    try:
        plain.start()
        secured.start()
        rights = ["on", ">secret", f"~{domain_pattern(DOMAIN)}", *RULES]
        secured.admin().execute_command("ACL", "SETUSER", "data", *rights)
        (tmp_path / "password").write_text("secret\n")
        tls = {"ca_file": str(tmp_path / "ca.crt"), "server_name": SERVER_NAME}
        gate = GateStandIn(tmp_path)
        credentials = {"username": "data", "password_file": str(tmp_path / "password")}
        tiers = [
            tier(plain.port, "plain", **PATIENT), tier(secured.port, "secured", tls=tls, **credentials, **PATIENT),
        ]  # fmt: skip
        server = start_server(tmp_path, gate, tiers)
        gate.allow(KEYSPACE_A)
        closed = [("plain", "closed"), ("secured", "closed")]
        until(lambda: [(state.name, state.breaker) for state in gate.state().tiers] == closed, gate.state)
        server.store(1, KEYSPACE_A, 7)
        until(lambda: [state.stored for state in gate.state().tiers] == [CHUNKS, CHUNKS], gate.state)
        plain.kill()
        server.forget_memory()
        answer = server.read(1, KEYSPACE_A)
        assert (answer["hits"], answer.get("values")) == (CHUNKS, [7.0]), gate.state()
        gate.allow(KEYSPACE_B)
        server.forget_memory()
        assert server.read(1, KEYSPACE_A)["hits"] == 0
    finally:
        plain.kill()
        secured.kill()


def test_a_server_without_a_shared_tier_acknowledges_its_policy(start_server: StartServer, tmp_path: Path) -> None:
    gate = GateStandIn(tmp_path)
    server = start_server(tmp_path, gate, [None])
    ack = gate.allow(KEYSPACE_A)
    assert ack.revision == 1
    assert gate.state().tiers == ()
    server.store(1, KEYSPACE_A, 7)
    found = server.read(1, KEYSPACE_A)
    assert (found["hits"], found["values"]) == (CHUNKS, [7.0]), "the server's own memory serves"
    assert server.read(1, KEYSPACE_B)["hits"] == 0
    assert server.get("/status")["is_healthy"]


def test_a_killed_server_comes_back_with_another_boot_and_serves_nothing_before_it_has_a_policy(
    start_server: StartServer, tmp_path: Path
) -> None:
    redis = RedisProcess(tmp_path)
    redis.start()
    gate = GateStandIn(tmp_path)
    try:
        server = start_server(tmp_path, gate, [tier(redis.port, **PATIENT)])
        first = gate.allow(KEYSPACE_A)
        until(lambda: gate.state().tiers[0].breaker == "closed", gate.state)
        server.store(1, KEYSPACE_A, 7)
        until(lambda: gate.state().tiers[0].stored == CHUNKS, gate.state)
        server.kill_and_start_again()
        until(lambda: gate.state().tiers[0].breaker == "closed", gate.state)
        assert gate.state().revision == 0
        assert server.read(1, KEYSPACE_A)["hits"] == 0
        again = gate.allow(KEYSPACE_A)
        assert again.boot != first.boot
        answer = server.read(1, KEYSPACE_A)
        assert (answer["hits"], answer.get("values")) == (CHUNKS, [7.0]), gate.state()
    finally:
        redis.kill()

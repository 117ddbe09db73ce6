"""The arguments, users and probe of a managed Redis tier with one shard, tried on a real redis-server."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from e2e.cluster.rootfs import server_command
from kvstrata.clients import pki
from kvstrata.clients.redis.nodes import RedisNodes
from kvstrata.clients.redis.probe import Access
from kvstrata.contract.store.redis_keys import BlockKey
from kvstrata.model.redis.cluster import ServerPod
from kvstrata.objects import names, paths
from kvstrata.objects.redis.cluster import build_shard_statefulset
from kvstrata.objects.redis.users import ADMIN_USER, DATA_USER, REPLICATION_USER
from kvstrata.objects.secret import redis_auth_data
from tests.support.redis_binary import needs_redis, put_client_into
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, cpu_tier, redis_tier

PASSWORD, ADMIN_PASSWORD = "d" * 32, "a" * 32
PASSWORDS = {DATA_USER: (PASSWORD,), ADMIN_USER: (ADMIN_PASSWORD,), REPLICATION_USER: ("r" * 32,)}
KEY = str(BlockKey(DOMAIN_ID, "a" * 32, "b" * 16, 0, 0, b"\x01" * 16))
FOREIGN_KEY = str(BlockKey("f" * 16, "a" * 32, "b" * 16, 0, 0, b"\x01" * 16))


class Server:
    """A redis-server that was started as its pod starts it, with the pod's paths moved to a folder."""

    def __init__(self, directory: Path, port: int, ca_pem: bytes | None) -> None:
        self.directory, self.port, self.ca_pem = directory, port, ca_pem

    def client(self, password: str, username: str = DATA_USER) -> Any:
        options: dict[str, Any] = {}
        if self.ca_pem is not None:
            options = {"ssl": True, "ssl_ca_data": self.ca_pem.decode(), "ssl_check_hostname": False}
        return redis.Redis(host="127.0.0.1", port=self.port, username=username, password=password, **options)

    def probe(self) -> int:
        container = _container(redis_tier(tls={"mode": "Issued" if self.ca_pem else "Disabled"}))
        put_client_into(self.directory)
        return subprocess.run(
            _moved(container["readinessProbe"]["exec"]["command"], self.directory, self.port),
            env={**os.environ, "PATH": f"{self.directory}:{os.environ['PATH']}"},
            check=False,
        ).returncode


@contextmanager
def _run(directory: Path, tls: bool) -> Iterator[Server]:
    port = _free_port()
    for folder in (paths.REDIS_AUTH, paths.REDIS_TLS, paths.TEMPORARY):
        (directory / folder.strip("/")).mkdir(parents=True)
    for name, value in redis_auth_data(DOMAIN_ID, PASSWORDS).items():
        (directory / paths.REDIS_AUTH.strip("/") / name).write_bytes(value)
    now = datetime.now(UTC)
    authority = pki.create_authority("kvstrata", now, pki.generate_key())
    pair = pki.issue_server(
        authority, names.redis_dns_names("shared", "team", "cluster.local"), now, pki.generate_key()
    )
    files = {"tls.crt": pair.certificate_pem, "tls.key": pair.key_pem, "ca.crt": authority.certificate_pem}
    for name, value in files.items():
        (directory / paths.REDIS_TLS.strip("/") / name).write_bytes(value)
    tier = redis_tier(tls={"mode": "Issued" if tls else "Disabled"})
    command = [*server_command(), *_moved(_container(tier)["args"], directory, port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "redis-server did not start"
                time.sleep(0.02)
        server = Server(directory, port, authority.certificate_pem if tls else None)
        _form(server.client(ADMIN_PASSWORD, ADMIN_USER))
        yield server
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    """A port whose bus has one, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        if port < 55_000:
            return port


def _form(admin: Any) -> None:
    """Give the server all slots, as the operator does, and wait until it serves them."""
    admin.config_set("cluster-node-timeout", 500)
    admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    deadline = time.monotonic() + 60
    while admin.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
        assert time.monotonic() < deadline, "the cluster of one does not serve"
        time.sleep(0.05)


def _moved(arguments: list[str], directory: Path, port: int) -> list[str]:
    def move(text: str) -> str:
        for path in (paths.REDIS_AUTH, paths.REDIS_TLS):
            text = text.replace(path, f"{directory}{path}")
        text = text.replace("$(POD_IP)", "127.0.0.1").replace("$(POD_NAME)", "pod")
        return text.replace(str(paths.REDIS_PORT), str(port))

    return [f"{directory}{paths.TEMPORARY}" if text == paths.TEMPORARY else move(text) for text in arguments]


def _container(tier: Any) -> dict[str, Any]:
    built = build_shard_statefulset(CONTEXT, tier, 0)
    assert built is not None
    container: dict[str, Any] = built["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.fixture(scope="module", params=[True, False], ids=["tls", "plain"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _run(tmp_path_factory.mktemp("redis"), request.param) as running:
        yield running


class TestARunningServer:
    pytestmark = needs_redis

    def test_is_found_alive_by_its_probe_without_a_password(self, server: Server) -> None:
        assert server.probe() == 0

    def test_has_the_capacity_as_its_bound_and_refuses_beyond(self, server: Server) -> None:
        info = server.client(ADMIN_PASSWORD, ADMIN_USER).info()
        assert info["maxmemory"] == 64 * 1024 * 1024
        assert info["maxmemory_policy"] == "noeviction"
        assert info["aof_enabled"] == 0

    def test_lets_the_data_user_store_and_read_its_domains_blocks(self, server: Server) -> None:
        client = server.client(PASSWORD)
        assert client.set(KEY, b"block", px=30_000)
        assert client.get(KEY) == b"block"
        assert client.strlen(KEY) == 5
        assert client.unlink(KEY) == 1
        assert client.eval("return redis.call('SET', KEYS[1], 'x')", 1, KEY) == b"OK"

    def test_keeps_the_data_user_from_other_domains(self, server: Server) -> None:
        client = server.client(PASSWORD)
        for command in (("GET", FOREIGN_KEY), ("SET", FOREIGN_KEY, "x"), ("UNLINK", FOREIGN_KEY)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)

    @pytest.mark.parametrize("declared", [FOREIGN_KEY, KEY])
    def test_keeps_the_data_users_scripts_from_other_domains(self, server: Server, declared: str) -> None:
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permissions|can't access at least one"):
            server.client(PASSWORD).eval("return redis.call('GET', ARGV[1])", 1, declared, FOREIGN_KEY)

    @pytest.mark.parametrize(
        "command", ["'SCAN', '0'", "'KEYS', '*'", "'FLUSHALL'", "'RANDOMKEY'", "'CONFIG', 'GET', '*'"]
    )
    def test_lets_scripts_do_no_more_than_their_user(self, server: Server, command: str) -> None:
        with pytest.raises(redis.exceptions.ResponseError, match=r"permissions|not allowed|can't run this command"):
            server.client(PASSWORD).eval(f"return redis.call({command})", 0)

    @pytest.mark.parametrize(
        "command",
        [
            ("SCAN", "0"),
            ("CLIENT", "TRACKING", "ON", "BCAST"),
            ("SCRIPT", "FLUSH"),
            ("SCRIPT", "KILL"),
            ("FUNCTION", "FLUSH"),
            ("SELECT", "1"),
            ("KEYS", "*"),
            ("RANDOMKEY",),
            ("DBSIZE",),
            ("FLUSHALL",),
            ("FLUSHDB",),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
            ("SHUTDOWN",),
            ("REPLICAOF", "NO", "ONE"),
            ("MIGRATE", "h", "1", "k", "0", "1"),
            ("SWAPDB", "0", "1"),
            ("CLIENT", "LIST"),
            ("MONITOR",),
        ],
        ids=" ".join,
    )
    def test_lets_the_data_user_neither_list_nor_administer(self, server: Server, command: tuple[str, ...]) -> None:
        with pytest.raises(redis.exceptions.NoPermissionError):
            server.client(PASSWORD).execute_command(*command)

    def test_lets_the_operators_user_see_figures_and_no_block(self, server: Server) -> None:
        client = server.client(ADMIN_PASSWORD, ADMIN_USER)
        assert client.info("replication")["role"] == "master"
        assert client.config_get("maxmemory")["maxmemory"] == str(64 * 1024 * 1024)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get(KEY)

    async def test_is_seen_by_the_operators_look(self, server: Server) -> None:
        name = names.redis_host("shared", "team")
        access = Access(ADMIN_PASSWORD, server.ca_pem, ADMIN_USER)
        pod = ServerPod("pod", "uid", 0, 0, "127.0.0.1", ready=True, deleting=False, revision="")
        nodes = RedisNodes(server.port, access, name, look_timeout_s=60.0, timeout_s=60.0)
        found = await nodes.look([pod])
        await nodes.close()
        assert found.servers["uid"].max_bytes == 64 * 1024 * 1024
        assert found.servers["uid"].cluster_ok

    def test_refuses_callers_without_a_password(self, server: Server) -> None:
        with pytest.raises(redis.exceptions.AuthenticationError):
            server.client("guess").get(KEY)


def test_no_password_is_in_the_acl_file() -> None:
    acl = redis_auth_data(DOMAIN_ID, PASSWORDS)[names.ACL_FILE_KEY]
    assert PASSWORD.encode() not in acl
    assert ADMIN_PASSWORD.encode() not in acl


def test_a_new_certificate_replaces_the_pod() -> None:
    one, other = (build_shard_statefulset(CONTEXT, redis_tier(), 0, revision) for revision in ("1", "2"))
    assert one is not None
    assert other is not None
    assert one["spec"]["template"] != other["spec"]["template"]


def test_a_tier_without_servers_of_its_own_has_no_objects() -> None:
    assert build_shard_statefulset(CONTEXT, cpu_tier(), 0) is None

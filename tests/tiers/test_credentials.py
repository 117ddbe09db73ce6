"""Passwords and certificates of a managed server change under an adapter that stores and loads, and nothing fails."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from kvstrata.clients.redis import admin
from kvstrata.clients.redis.admin import Admin, tend
from kvstrata.clients.redis.probe import Access
from kvstrata.model.redis.credentials import Stage
from kvstrata.objects import names
from kvstrata.plan.actions import ManagedServer, TendServers, TurnSecret
from kvstrata.plan.redis.credentials import Tending
from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.resp import AccessError
from kvstrata_sidecar.adapter.redis.client.slots import Address
from tests.support.redis_binary import needs_redis
from tests.tiers.gate_stand_in import KEYSPACE_A, GateStandIn
from tests.tiers.managed_server import LONG_AGO, TLS, USERS, Managed
from tests.tiers.redis_process import RedisProcess
from tests.tiers.server_kinds import DEFAULT, ServerKind, on_every_server
from tests.tiers.tier_driver import Driver, block, spread

pytestmark = needs_redis
ASKED_FOR_S = admin.COMMAND_TIMEOUT_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator waits for a server that a busy machine starves."""
    monkeypatch.setattr(admin, "COMMAND_TIMEOUT_S", 30.0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Managed]]:
    """Make managed servers."""
    made: list[Managed] = []

    def make(kind: ServerKind = DEFAULT, *, tls: bool = True, age: timedelta = LONG_AGO) -> Managed:
        directory = tmp_path / f"managed-{len(made)}"
        directory.mkdir()
        made.append(Managed(directory, kind.command(), tls=tls, age=age))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()


class Traffic:
    """Stores and loads without a pause, opens a new connection each time as the adapter does, and notes failures."""

    def __init__(self, managed: Managed, driver: Driver) -> None:
        self._managed, self._driver = managed, driver
        self.failures: list[str] = []
        self.rounds = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic")

    def __enter__(self) -> Traffic:
        self._thread.start()
        self.go_on()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def go_on(self) -> None:
        """Wait until everything was tried with what is in force now."""
        wanted, give_up_at_s = self.rounds + 2, time.monotonic() + 60
        while self.rounds < wanted:
            assert time.monotonic() < give_up_at_s, self.failures
            time.sleep(0.002)

    def _run(self) -> None:
        while not self._over.is_set():
            one = block(KEYSPACE_A, spread(self.rounds % 200))
            if not self._driver.store([one], fill=self.rounds % 200).successful:
                self.failures.append("a block was not stored")
            hits, buffers = self._driver.load([one])
            if hits != [1] or buffers[0][0] != self.rounds % 200:
                self.failures.append(f"a block was not loaded: {hits}, {buffers[0][0]} of {self.rounds}")
            try:
                enter(self._managed)
            except Exception as error:
                self.failures.append(str(error))
            self.rounds += 1


def enter(managed: Managed, *, username: str = "data", password: str | None = None) -> None:
    """Open a connection as the adapter does, with the files that the pod has now, or with another password."""
    if password is not None:
        (managed.user / names.PASSWORD_KEY).write_text(password)
    access = managed.access | {"username": username, "connect_timeout_ms": 30_000, "io_timeout_ms": 30_000}
    dial(Address("127.0.0.1", managed.process.port), TierParams("shared", **access)).close()


@pytest.fixture
def busy(
    make: Callable[..., Managed], start: Callable[..., Driver], gate: GateStandIn
) -> Callable[..., tuple[Managed, Traffic]]:
    """Make a managed server and traffic on it."""

    def begin(kind: ServerKind = DEFAULT, *, tls: bool = True, age: timedelta = LONG_AGO) -> tuple[Managed, Traffic]:
        managed = make(kind, tls=tls, age=age)
        driver = start(managed.process.port, **managed.access)
        driver.until("closed")
        gate.allow(KEYSPACE_A)
        return managed, Traffic(managed, driver)

    return begin


def had_effects(tending: Tending) -> bool:
    """Whether servers were told anything or a Secret was written."""
    return any(isinstance(one, TurnSecret) or (isinstance(one, TendServers) and one.orders) for one in tending.actions)


def rotate(managed: Managed, traffic: Traffic, *, kill_operator: bool = False) -> None:
    """Let passwords that are due be rotated, and a certificate be renewed, with traffic between any two steps."""
    for _ in range(120):
        tending = managed.round()
        traffic.go_on()
        if kill_operator and had_effects(tending):
            managed.restart_operator()
        told = {one.reason for one in tending.findings}
        if not had_effects(tending) and told <= {"PasswordsSet", "CertificateShown"} and managed.stage is Stage.CURRENT:
            return
        managed.pass_s(15 if kill_operator else 45)
    raise AssertionError(f"no end: {tending}")


@on_every_server
def test_passwords_are_rotated_without_a_failed_request(
    busy: Callable[..., tuple[Managed, Traffic]], server_kind: ServerKind, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    managed, traffic = busy(server_kind, tls=server_kind.tls)
    before = managed.secret()
    shown = managed.secret(TLS) if managed.tls else {}
    with traffic:
        rotate(managed, traffic)
    assert traffic.failures == []
    after = managed.secret()
    passwords = [key for key in before if key.endswith("password")]
    assert len(passwords) == 3
    assert all(after[key] != before[key] for key in passwords)
    if managed.tls:
        assert managed.secret(TLS)[names.CERTIFICATE_KEY] != shown[names.CERTIFICATE_KEY]
        assert managed.condition("CertificateCurrent") == ("True", "CertificateShown")
    enter(managed)
    (managed.user / names.PASSWORD_KEY).write_bytes(before[names.PASSWORD_KEY])
    with pytest.raises(AccessError):
        enter(managed)
    assert managed.condition("PasswordsCurrent") == ("True", "PasswordsSet")
    told = caplog.text
    assert "server updated" in told
    assert not any(one[key].decode() in told for one in (before, after) for key in passwords)


def test_operators_that_die_after_every_step_rotate_without_a_failed_request(
    busy: Callable[..., tuple[Managed, Traffic]],
) -> None:
    managed, traffic = busy()
    before = managed.secret()
    with traffic:
        rotate(managed, traffic, kill_operator=True)
    assert traffic.failures == []
    assert managed.secret()[names.PASSWORD_KEY] != before[names.PASSWORD_KEY]


def test_another_authority_takes_over_without_a_failed_request(
    busy: Callable[..., tuple[Managed, Traffic]],
) -> None:
    managed, traffic = busy(age=timedelta())
    with traffic:
        former = managed.secret(TLS)[names.AUTHORITY_KEY]
        managed.change_authority()
        rotate(managed, traffic)
        managed.pass_s(120)
        traffic.go_on()
    assert traffic.failures == []
    trusted = managed.secret(TLS)[names.AUTHORITY_KEY]
    assert trusted != former
    assert trusted == managed.secret_store.authority.certificate_pem
    (managed.user / names.AUTHORITY_KEY).write_bytes(former)
    with pytest.raises(AccessError, match="not trusted"):
        enter(managed)


def test_a_server_that_starts_with_an_older_file_is_healed(make: Callable[..., Managed]) -> None:
    managed = make()
    while managed.stage is not Stage.OVERLAP:
        if not managed.round().actions:
            managed.pass_s(30)
    managed.settle()
    managed.bring_files(newest=True)
    older = managed.writes[0][1][names.ACL_FILE_KEY]
    (managed.pod / names.ACL_FILE_KEY).write_bytes(older)
    managed.process.kill()
    managed.process.start()
    with pytest.raises(AccessError, match="WRONGPASS"):
        enter(managed)
    managed.pass_s(30)
    managed.settle()
    enter(managed)


def test_a_replica_follows_with_the_new_password_and_the_old_one_is_good_for_nothing(
    make: Callable[..., Managed], tmp_path: Path
) -> None:
    managed = make(tls=False)
    former = managed.secret()[names.REPLICATION_PASSWORD_KEY].decode()
    replica = managed.follow(tmp_path, DEFAULT.command())
    try:
        in_step(managed, replica)
        for _ in range(120):
            tending = managed.round()
            if not had_effects(tending) and {one.reason for one in tending.findings} == {"PasswordsSet"}:
                break
            in_step(managed, replica)
            managed.pass_s(45)
        managed.pass_s(120)
        managed.settle()
        managed.process.kill()
        managed.process.start()
        in_step(managed, replica)
        assert managed.condition("PasswordsCurrent") == ("True", "PasswordsSet")
        with pytest.raises(AccessError):
            enter(managed, username="replication", password=former)
    finally:
        replica.kill()


def in_step(managed: Managed, replica: RedisProcess) -> None:
    """Wait until a replica has what its primary has."""
    give_up_at_s = time.monotonic() + 60
    password = managed.secret()[names.ADMIN_PASSWORD_KEY].decode()
    while True:
        try:
            client = redis.Redis(port=replica.port, username="admin", password=password)
            if client.info("replication")["master_link_status"] == "up":
                return
        except redis.RedisError:
            password = managed.secret().get(f"previous-{names.ADMIN_PASSWORD_KEY}", password.encode()).decode()
        assert time.monotonic() < give_up_at_s
        time.sleep(0.02)


def test_lost_passwords_are_told_and_no_server_is_spoken_to(make: Callable[..., Managed]) -> None:
    managed = make(tls=False)
    managed.settle()
    before = managed.writes[0][1][names.PASSWORD_KEY]
    managed.lose_passwords()
    managed.pass_s(30)
    managed.round()
    assert managed.condition("PasswordsCurrent") == ("False", "PasswordsLost")
    enter(managed)
    assert (managed.user / names.PASSWORD_KEY).read_bytes() == before


RULES = {"data": ("on", "#" + "0" * 64), "rules-none": ("off",)}


class TestFailures:
    def tend(self, server: ManagedServer, accesses: list[Access], order: str = "") -> tuple[str, str]:
        nowhere = {"tls-cert-file": "/nowhere", "tls-key-file": "/nowhere"}
        orders: dict[str, Callable[[Admin], Awaitable[None]]] = {
            "users": lambda one: one.set_users({"data": ("on", "+nosuchcommand")}),
            "certificate": lambda one: one.load_certificate(nowhere),
        }
        chosen = [orders[order]] if order else []
        seen = asyncio.run(tend(server, accesses, RULES, chosen))
        return seen.reason, seen.message

    def entry(self, managed: Managed, *passwords: str, **changes: Any) -> list[Access]:
        own = managed.secret()[names.ADMIN_PASSWORD_KEY].decode()
        chosen = {"username": "admin", "ca_pem": managed.secret(TLS)[names.AUTHORITY_KEY]} | changes
        return [Access(one, **chosen) for one in passwords or (own,)]

    def test_are_named_and_tell_no_secret(self, make: Callable[..., Managed], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admin, "COMMAND_TIMEOUT_S", 60.0)
        managed = make()
        server = managed.server
        entry = self.entry(managed)
        other = make().secret(TLS)[names.AUTHORITY_KEY]
        seen = {
            "right": self.tend(server, entry),
            "second": self.tend(server, [*self.entry(managed, "wrong"), *entry]),
            "wrong": self.tend(server, self.entry(managed, "wrong", "worse")),
            "none": self.tend(server, []),
            "untrusted": self.tend(server, self.entry(managed, ca_pem=other)),
            "junk": self.tend(server, self.entry(managed, ca_pem=b"")),
            "name": self.tend(ManagedServer("one", server.endpoint, "elsewhere"), entry),
            "plain": self.tend(server, self.entry(managed, ca_pem=None)),
            "refused": self.tend(ManagedServer("one", "127.0.0.1:1", server.server_name), entry),
            "rights": self.tend(server, self.entry(
                managed, managed.secret()[names.PASSWORD_KEY].decode(), username="data"
            )),
            "users": self.tend(server, entry, "users"),
            "certificate": self.tend(server, entry, "certificate"),
        }  # fmt: skip
        assert {name: reason for name, (reason, _) in seen.items()} == {
            "right": "",
            "second": "",
            "wrong": "WrongPassword",
            "none": "PasswordRequired",
            "untrusted": "CertificateRefused",
            "junk": "InvalidCertificateAuthority",
            "name": "CertificateRefused",
            "plain": "Disconnected",
            "refused": "ConnectionRefused",
            "rights": "NoPermission",
            "users": "Error",
            "certificate": "Error",
        }
        told = " ".join(message for _, message in seen.values())
        secrets = {key: value.decode() for name in (USERS,) for key, value in managed.secret(name).items()}
        assert not any(secrets[key] in told for key in secrets if key.endswith("password"))
        assert "CONFIG SET tls-cert-file" in seen["certificate"][1]
        assert "ACL SETUSER data" in seen["users"][1]

    def test_a_server_that_hangs_is_given_up_in_time(
        self, make: Callable[..., Managed], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(admin, "COMMAND_TIMEOUT_S", ASKED_FOR_S)
        managed = make(tls=False)
        password = managed.secret()[names.ADMIN_PASSWORD_KEY].decode()
        managed.process.freeze()
        started = time.monotonic()
        assert self.tend(managed.server, [Access(password, None, "admin")])[0] == "Timeout"
        assert time.monotonic() - started < 20, "it would hang for ever"
        managed.process.thaw()

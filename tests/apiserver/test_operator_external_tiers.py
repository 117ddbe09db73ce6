"""Tiers on real servers with a defect each, checked by the operator process: what they end with, and what pods get."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Root
from kvstrata.contract.store.redis_keys import domain_pattern
from kvstrata.contract.store.redis_scripts import COMMANDS
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.server import NAMESPACE, Server
from tests.support.redis_binary import needs_redis
from tests.tiers.redis_process import RedisProcess

pytestmark = needs_redis

CAPACITY = "64Mi"
BOUNDED = ("--maxmemory", "64mb")
DEFECTS: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, str]]] = {
    "ext-well": ((), {}, ("True", "TierReady")),
    "ext-cluster": (("--cluster-enabled", "yes"), {}, ("False", "ClusterModeMismatch")),
    "ext-single": ((), {"cluster": True}, ("False", "ClusterModeMismatch")),
    "ext-replica": (("--replicaof", "127.0.0.1 1"), {}, ("False", "ReadOnlyReplica")),
    "ext-small": (("--maxmemory", "16mb"), {}, ("False", "ServerTooSmall")),
    "ext-evicts": (("--maxmemory-policy", "allkeys-lru"), {}, ("True", "NotNoeviction")),
    "ext-secret": (("--requirepass", "right"), {"authSecretRef": {"name": "ext-wrong"}}, ("False", "WrongPassword")),
    "ext-user": (
        (),
        {"username": "data", "authSecretRef": {"name": "ext-data"}},
        ("False", "MissingPermissions"),
    ),
}
"""By the tier's name: options of its server, its spec, and its Ready condition."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RedisProcess]]:
    folder = tmp_path_factory.mktemp("servers")
    started = {}
    for name, (options, _, _) in DEFECTS.items():
        files = ("--cluster-config-file", f"{name}.conf")
        started[name] = RedisProcess(folder, *BOUNDED, *files, *options)
        started[name].start()
    yield started
    for one in started.values():
        one.kill()


@pytest.fixture(scope="module")
def tiers(server: Server, operator: OperatorProcess, servers: dict[str, RedisProcess]) -> Iterator[list[str]]:
    """All tiers, once the operator has said something of each."""
    for name, value in (("ext-wrong", b"wrong"), ("ext-data", b"data\n")):  # as `echo` writes it
        data = {"password": base64.b64encode(value).decode()}
        server.apply({"apiVersion": "v1", "kind": "Secret", "metadata": _named(name), "data": data})
    may(servers["ext-user"], "-evalsha")
    for name, (_, more, _) in DEFECTS.items():
        external = {"endpoints": [f"127.0.0.1:{servers[name].port}"], **more}
        spec = {"medium": "Redis", "capacity": CAPACITY, "encryption": "Disabled", "redis": {"external": external}}
        server.apply(
            {"apiVersion": "kvstrata.io/v1alpha1", "kind": "CacheTier", "metadata": _named(name), "spec": spec}
        )
    until(lambda: all(told(one) for one in statuses(server).values()), operator)
    yield list(DEFECTS)
    server.kubectl("-n", NAMESPACE, "delete", "cachetier", *DEFECTS)
    server.kubectl("-n", NAMESPACE, "delete", "secret", "ext-wrong", "ext-data")


def test_a_tier_with_a_defect_ends_with_its_reason(server: Server, tiers: list[str], operator: OperatorProcess) -> None:
    expected = {name: ready for name, (_, _, ready) in DEFECTS.items()}
    found: dict[str, dict[str, Any]] = {}

    def have_ended() -> bool:
        """Whether each tier has its reason: one with a server that answered too late is asked again."""
        found.update(statuses(server))
        return {name: condition(found[name], "Ready") for name in tiers} == expected

    try:
        until(have_ended, operator)
    except AssertionError as error:
        reasons = {name: condition(found[name], "Ready") for name in tiers}
        raise AssertionError(f"{reasons}\n{error}") from None
    for status in found.values():
        assert "right" not in json.dumps(status).split()
        assert ("external" in status) == (condition(status, "Ready")[0] == "True")


def test_a_model_takes_a_tier_up_when_its_user_got_what_was_missing(
    server: Server, tiers: list[str], servers: dict[str, RedisProcess], operator: OperatorProcess
) -> None:
    listed = (server.get("cachedmodel", "smollm2") or {})["spec"]["tiers"]
    server.patch("cachedmodel", "smollm2", tiers=[*listed, {"name": "ext-user"}])
    try:
        until(lambda: server.condition("CachedModel", "smollm2", "TiersBound")[1] == "TierNotReady", operator)
        assert "ext-user" not in used(server)
        may(servers["ext-user"])
        until(lambda: "ext-user" in used(server), operator)
        until(lambda: server.condition("CacheTier", "ext-user", "Ready") == ("True", "TierReady"), operator)
        may(servers["ext-user"], "-get")
        until(lambda: server.condition("CacheTier", "ext-user", "Ready") == ("False", "MissingPermissions"), operator)
        assert "ext-user" in used(server)
    finally:
        server.patch("cachedmodel", "smollm2", tiers=listed)
    until(lambda: "ext-user" not in used(server), operator)


def may(server: RedisProcess, *rules: str) -> None:
    """Give the user `data` what the guide says, on every domain's keys, changed by these rules."""
    rights = (f"+{command}" for command in COMMANDS)
    server.admin().execute_command(
        "ACL", "SETUSER", "data", "reset", "on", ">data", f"~{domain_pattern('*')}", *rights, *rules
    )


def statuses(server: Server) -> dict[str, dict[str, Any]]:
    """The status of each tier of this file."""
    items = json.loads(server.kubectl("-n", NAMESPACE, "get", "cachetiers", *DEFECTS, "-o", "json"))["items"]
    return {item["metadata"]["name"]: item.get("status") or {} for item in items}


def condition(status: dict[str, Any], kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    found = (one for one in status.get("conditions") or () if one["type"] == kind)
    return next(((one["status"], one["reason"]) for one in found), ("", ""))


def told(status: dict[str, Any]) -> bool:
    """Whether the operator has heard of the tier's server."""
    return condition(status, "ServersSuitable")[1] not in ("", "Progressing")


def used(server: Server) -> set[str]:
    """The tiers that the model's pods are given."""
    root = (server.get("secret", "kvs-smollm2-bundle") or {"data": {}})["data"].get(ROOT_DATA_KEY, "")
    return {tier.name for tier in Root.decode(base64.b64decode(root)).tiers} if root else set()


def until(holds: Callable[[], bool], operator: OperatorProcess, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, operator.log_tail()
        time.sleep(0.2)


def _named(name: str) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE}

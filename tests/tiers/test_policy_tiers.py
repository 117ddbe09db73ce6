"""The Redis tiers of a cache server are those of its policy, in its order, before it acknowledges."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.policy.tiers import AllowedServers, Server, TierRules
from kvstrata_sidecar.adapter.params import AdapterParams
from kvstrata_sidecar.adapter.runtime import Leave, PolicyTiers, Runtime, acquire, release
from kvstrata_sidecar.adapter.start import _join
from tests.adapter.memory_server import until
from tests.support.redis_binary import needs_redis
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY, KEYSPACE_A, GateStandIn
from tests.tiers.redis_process import RedisProcess

pytestmark = needs_redis

POD = AdapterParams(DOMAIN, IDENTITY, None, "/policy", "/link")


def rules(name: str, **options: Any) -> TierRules:
    return TierRules(name, (Server("127.0.0.1", 1),), 1 << 20, **options)


A, B, C = (rules(name) for name in "abc")


@dataclass
class LMCache:
    """What LMCache does with adapters: it uses them in the order in which they came."""

    used: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)

    def join(self, params: Mapping[str, Any]) -> Leave:
        name = AdapterParams.from_json(params).tier.name  # type: ignore[union-attr]
        if name in self.busy:
            raise RuntimeError("the loop is busy")
        self.used.append(name)
        self.steps.append(f"+{name}")
        return partial(self.leave, name)

    def leave(self, name: str, _within_s: float) -> None:
        if name in self.busy:
            raise TimeoutError("still in use")
        self.used.remove(name)
        self.steps.append(f"-{name}")


@pytest.fixture
def lmcache() -> LMCache:
    return LMCache()


@pytest.fixture
def tiers(lmcache: LMCache) -> PolicyTiers:
    made = PolicyTiers(POD)
    made.join = lmcache.join
    return made


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ((), (A, B), ["+a", "+b"]),
        ((A, B), (A, B), []),
        ((A, B, C), (A, C), ["-b"]),
        ((A, B), (B,), ["-a"]),
        ((A, B), (A, C, B), ["-b", "+c", "+b"]),
        ((A, B), (B, A), ["-a", "-b", "+b", "+a"]),
        ((A, B), (replace(A, capacity_bytes=1, retention_s=1, servers=(Server("other", 2),)), B), []),
        ((A, B), (replace(A, username="data"), B), ["-a", "-b", "+a", "+b"]),
        ((A,), (replace(A, allowed=AllowedServers()),), ["-a", "+a"]),
        ((A,), (), ["-a"]),
    ],
)
def test_what_changed_is_left_and_joined_and_nothing_else(
    tiers: PolicyTiers,
    lmcache: LMCache,
    before: tuple[TierRules, ...],
    after: tuple[TierRules, ...],
    steps: list[str],
) -> None:
    tiers.follow(before, [])
    lmcache.steps.clear()
    tiers.follow(after, [one.name for one in before])
    assert sorted(lmcache.steps) == sorted(steps)
    assert lmcache.used == [one.name for one in after]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, (None, None, None, False, "Disabled")),
        ({"allowed": AllowedServers(("a",), ("10.0.0.0/8",), ("::1",))}, (None, None, None, False, "Disabled")),
        (
            {"username": "data", "password": True, "tls": True, "cluster": True, "encrypts": True},
            ("data", "/policy/tiers/a.password", "/policy/tiers/a.ca.crt", True, "Required"),
        ),
    ],
)
def test_a_tier_gets_its_access_from_the_files_that_the_gate_writes(
    tiers: PolicyTiers, options: dict[str, Any], found: tuple[object, ...]
) -> None:
    joined: list[AdapterParams] = []

    def join(params: Mapping[str, Any]) -> Leave:
        joined.append(AdapterParams.from_json(params))
        return lambda _: None

    tiers.join = join
    tiers.follow([rules("a", **options)], [])
    (params,) = joined
    tier: Any = params.tier
    assert tier.allowed == options.get("allowed")
    authority = tier.tls.ca_file if tier.tls else None
    assert replace(params, tier=None) == POD
    assert (tier.username, tier.password_file, authority, tier.cluster, tier.encryption) == found
    assert tier.endpoints == ()


def test_tiers_of_the_servers_own_parameters_stay(tiers: PolicyTiers, lmcache: LMCache) -> None:
    tiers.follow([A, B], ["a"])
    tiers.follow([], ["a", "b"])
    assert lmcache.steps == ["+b", "-b"]


def test_a_tier_in_use_is_left_when_the_gate_asks_again(tiers: PolicyTiers, lmcache: LMCache) -> None:
    tiers.follow([A, B], [])
    lmcache.busy.add("a")
    with pytest.raises(ContractError, match="tier a cannot be joined or left now: still in use"):
        tiers.follow([B, C], ["a", "b"])
    lmcache.busy.clear()
    tiers.follow([B, C], ["a", "b"])
    assert lmcache.used == ["b", "c"]


def test_a_tier_that_does_not_start_is_joined_when_the_gate_asks_again(tiers: PolicyTiers, lmcache: LMCache) -> None:
    lmcache.busy.add("a")
    for _ in range(2):
        with pytest.raises(ContractError, match="the loop is busy"):
            tiers.follow([A], [])
    lmcache.busy.clear()
    tiers.follow([A], [])
    assert lmcache.used == ["a"]


def test_a_server_that_cannot_start_tiers_yet_acknowledges_none() -> None:
    tiers = PolicyTiers(POD)
    tiers.follow([], [])
    with pytest.raises(ContractError, match="cannot start tiers yet"):
        tiers.follow([A], [])


@pytest.fixture
def runtime(gate: GateStandIn) -> Iterator[Runtime]:
    made = acquire(AdapterParams(DOMAIN, IDENTITY, None, gate.policy_dir, gate.link_dir))
    made.policy_tiers.join = partial(_join, made)
    yield made
    made.policy_tiers.follow([], [])
    release(made)


def test_a_pod_reports_a_tier_from_its_acknowledgement_on_and_leaves_nothing_of_it(
    runtime: Runtime, gate: GateStandIn, redis_server: RedisProcess
) -> None:
    shared = TierRules("shared", (Server("127.0.0.1", redis_server.port),), 1 << 20)
    for _ in range(2):
        gate.enforce({KEYSPACE_A: ()}, tiers=(shared,))
        assert [tier.name for tier in gate.state().tiers] == ["shared"]
        until(lambda: runtime.tiers[0].state().breaker == "closed")
        gate.enforce({KEYSPACE_A: ()})
        assert gate.state().tiers == ()
        until(lambda: not any(thread.name.startswith("kvs-shared") for thread in threading.enumerate()))
        until(lambda: all(one["addr"].startswith("/") for one in redis_server.admin().client_list()))


def test_a_revision_whose_tiers_cannot_be_joined_is_not_acknowledged(runtime: Runtime, gate: GateStandIn) -> None:
    gate.allow(KEYSPACE_A)
    runtime.policy_tiers.join = None
    with pytest.raises(ContractError, match="cannot start tiers yet"):
        gate.enforce({KEYSPACE_A: ()}, tiers=(A,))

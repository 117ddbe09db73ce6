"""The operator's audit log tells what was written, once, without tenants' names unless the domain has them told."""

from __future__ import annotations

import logging
import secrets
from datetime import UTC, datetime

import pytest
from prometheus_client import REGISTRY

from kvstrata.contract.messages.audit import Action, Event, Line
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.secrets import AUTHORITY_SECRET, SecretStore
from tests.support.audit import lines
from tests.support.memory_kube import MemoryKube
from tests.support.objects import (
    NAMESPACE,
    STALLED_REDIS,
    cpu_tier,
    domain,
    group,
    invalidation,
    model,
    older_tier,
    pod,
    policy,
    pool,
    redis_tier,
)
from tests.support.receipts import DOMAIN, erasure
from tests.support.worlds import Simulation

OPERATOR_NAMESPACE = "kvstrata-system"


@pytest.fixture
def simulation(caplog: pytest.LogCaptureFixture) -> Simulation:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    made = Simulation(domain(), cpu_tier(), model(tiers=("cpu",)), pod("pod-0"))
    made.come_to_rest()
    made.ack_all()
    caplog.clear()
    return made


def of(caplog: pytest.LogCaptureFixture, event: Event) -> list[Line]:
    return [line for line in lines(caplog) if line.event is event]


def shares(caplog: pytest.LogCaptureFixture) -> list[tuple[Action, str | None, str | None]]:
    return [(line.action, line.object, line.shared_with) for line in of(caplog, Event.SHARE)]


def test_who_shares_with_whom_is_told_when_a_bundle_says_so_and_when_it_no_longer_does(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    simulation.put(policy("acme", group="cooks"), policy("globex", group="cooks"), policy("alone"))
    simulation.put(group("cooks", "acme", "globex"))
    simulation.come_to_rest()
    both = [(Action.SHARING_BEGAN, f"TenantCachePolicy/{name}", "TenantGroup/cooks") for name in ("acme", "globex")]
    assert sorted(shares(caplog)) == both
    entry = simulation.entry("acme")
    line = next(line for line in of(caplog, Event.SHARE) if line.object == "TenantCachePolicy/acme")
    assert (line.namespace, line.model, line.uid) == (NAMESPACE, "tiny", entry.policy)
    assert entry.keyspace.startswith(line.scope or "none")
    assert 0 < (line.revision or 0) <= simulation.bundle("tiny").root.revision
    caplog.clear()
    simulation.edit("TenantGroup", "cooks", members=["globex"])
    simulation.come_to_rest()
    assert shares(caplog) == [(Action.SHARING_ENDED, "TenantCachePolicy/acme", "TenantGroup/cooks")]


def test_readers_of_a_pool_share_it_and_who_is_suspended_shares_nothing(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    simulation.put(policy("acme", pools=[{"name": "docs"}]), policy("all", isolation="Public"))
    simulation.put(pool("docs", "acme"))
    simulation.come_to_rest()
    assert sorted(shares(caplog)) == [
        (Action.SHARING_BEGAN, "TenantCachePolicy/acme", "PrefixPool/docs"),
        (Action.SHARING_BEGAN, "TenantCachePolicy/all", "Public"),
    ]
    caplog.clear()
    simulation.edit("TenantCachePolicy", "acme", suspend=True)
    simulation.come_to_rest()
    assert shares(caplog) == [(Action.SHARING_ENDED, "TenantCachePolicy/acme", "PrefixPool/docs")]


def test_an_operator_that_starts_again_tells_nothing_anew(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    simulation.put(policy("acme", group="cooks"), policy("globex", group="cooks"), group("cooks", "acme", "globex"))
    simulation.put(older_tier(), redis_tier("wrong", redis=STALLED_REDIS))
    simulation.come_to_rest()
    caplog.clear()
    simulation.restart()
    simulation.come_to_rest()
    assert lines(caplog) == []


@pytest.mark.parametrize("names_told", [None, "Scopes", "Tenants"])
def test_tenants_are_named_only_where_the_domain_says_so(
    simulation: Simulation, caplog: pytest.LogCaptureFixture, names_told: str | None
) -> None:
    if names_told:
        simulation.edit("CacheDomain", "default", auditNames=names_told)
    tiers = [{"tier": "cpu", "guaranteed": "1Mi"}]
    simulation.put(policy("acme", name="p1", budgets=tiers), policy("globex", name="p2", isolation="Public"))
    simulation.put(policy("acme", name="p3"))
    simulation.come_to_rest()
    told = lines(caplog)
    named = {(line.action, line.tenant) for line in told if (line.object or "").startswith("TenantCachePolicy/")}
    expected = {"acme", "globex"} if names_told == "Tenants" else {None}
    assert {tenant for _, tenant in named} == expected
    assert {action for action, _ in named} == {
        Action.GUARANTEE_ADMITTED,
        Action.SHARING_BEGAN,
        Action.OBJECT_STALLED,
    }
    assert simulation.bundle("tiny").root.rules.audit_tenants is (names_told == "Tenants")


def test_an_object_that_is_not_carried_out_is_a_denial_once(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    simulation.put(policy("acme", name="older"))
    simulation.come_to_rest()
    simulation.advance(1)
    simulation.put(policy("acme", name="younger"))
    simulation.come_to_rest()
    simulation.step(Key("TenantCachePolicy", NAMESPACE, "younger"))
    (line,) = [line for line in of(caplog, Event.DENIAL) if line.action is Action.OBJECT_STALLED]
    assert (line.object, line.reason) == ("TenantCachePolicy/younger", "TenantConflict")


def test_each_phase_of_an_invalidation_is_told(simulation: Simulation, caplog: pytest.LogCaptureFixture) -> None:
    simulation.put(policy("acme"))
    simulation.come_to_rest()
    caplog.clear()
    simulation.put(invalidation("leave", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    simulation.ack_all()
    simulation.come_to_rest()
    told = of(caplog, Event.ERASE)
    assert {line.object for line in told} == {"CacheInvalidation/leave"}
    assert [line.phase for line in told][-1] == simulation.status("CacheInvalidation", "leave")["phase"] == "Complete"
    assert len({line.phase for line in told}) == len(told)


def test_keys_are_told_by_the_secret_that_has_them_and_never_by_their_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    plain = {"managed": {"tls": {"mode": "Disabled"}}}
    made = Simulation(domain(), redis_tier(encryption="Required", redis=plain), model(tiers=("shared",)), pod("pod-0"))
    made.put(policy("acme"))
    made.come_to_rest()
    told = of(caplog, Event.KEY)
    by_material = {line.material: line for line in told}
    assert {"DomainKey", "DataKeys", "RedisUsers", "ServerCertificate"} <= by_material.keys()
    assert by_material["DomainKey"].object == f"Secret/{names.DOMAIN_KEY_SECRET}"
    assert {line.action for line in told} == {Action.KEYS_MADE}
    world = made.world
    held = [world.domain_key or b"", *world.data_keys.values()]
    entry = made.entry("acme")
    for line in told:
        shown = str(line)
        assert not any(secret.hex() in shown or str(secret) in shown for secret in held)
        assert entry.keyspace not in shown


def test_a_data_key_that_leaves_its_secret_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    plain = {"managed": {"tls": {"mode": "Disabled"}}}
    made = Simulation(domain(), redis_tier(encryption="Required", redis=plain), model(tiers=("shared",)), pod("pod-0"))
    made.put(policy("acme"))
    made.come_to_rest()
    made.ack_all()
    held = set(made.world.data_keys)
    made.put(invalidation("leave", scope={"tenant": "acme"}))
    for _ in range(4):
        made.come_to_rest()
        made.ack_all()
        made.advance(3600)
    gone = held - set(made.world.data_keys)
    assert gone
    removed = [line for line in of(caplog, Event.KEY) if line.action is Action.KEYS_REMOVED]
    assert sum(line.count or 0 for line in removed) == len(gone)


async def test_keys_of_the_operator_itself_are_told_when_they_are_made_and_not_when_they_are_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvstrata.audit")
    kube, now = MemoryKube(), datetime(2026, 1, 1, tzinfo=UTC)
    for order in ("order-1", "order-2"):
        await SecretStore(kube, OPERATOR_NAMESPACE, secrets.token_bytes, lambda: now).open()
        await Chains(kube, OPERATOR_NAMESPACE, lambda: now).issue(NAMESPACE, DOMAIN, None, erasure(order))
    assert [(line.action, line.namespace, line.object) for line in lines(caplog)] == [
        (Action.KEYS_MADE, OPERATOR_NAMESPACE, f"Secret/{AUTHORITY_SECRET}"),
        (Action.KEYS_MADE, OPERATOR_NAMESPACE, f"Secret/{names.RECEIPTS_KEY_SECRET}"),
    ]


def test_how_long_a_lazy_invalidation_took_is_counted_once(simulation: Simulation) -> None:
    def counted() -> tuple[float, float]:
        labels = {"mode": "Lazy", "step": "unreachable"}
        names = ("kvstrata_invalidation_seconds_count", "kvstrata_invalidation_seconds_sum")
        count, seconds = (REGISTRY.get_sample_value(name, labels) or 0.0 for name in names)
        return count, seconds

    simulation.put(policy("acme"))
    simulation.come_to_rest()
    simulation.ack_all()
    count, seconds = counted()
    simulation.put(invalidation("leave", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.advance(7)
    assert counted() == (count, seconds)
    simulation.come_to_rest()
    simulation.restart()
    simulation.come_to_rest()
    told = simulation.status("CacheInvalidation", "leave")
    took = datetime.fromisoformat(told["completionTime"]) - datetime.fromisoformat(told["startTime"])
    assert took.total_seconds() >= 7
    assert counted() == (count + 1, pytest.approx(seconds + took.total_seconds()))

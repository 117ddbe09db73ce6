"""The watches feed the store and the queue, and write nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import kopf
import pytest

from kvstrata.clients.resources import OWN_RESOURCES, SECRET, Resource, child_resources
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.reconcile.queue import WorkQueue
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.secrets import SecretStore
from kvstrata.reconcile.store import Store
from kvstrata.reconcile.watch import Watches, build_settings, expected_watchers
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, model, policy
from tests.support.worlds import Simulation


@pytest.fixture
def store() -> Store:
    return Store(lambda: bytes(64), lambda: datetime(2026, 1, 1, tzinfo=UTC))


def registry_of(
    store: Store, enqueue: Callable[[Iterable[Key]], None], service_monitors: bool
) -> kopf.OperatorRegistry:
    secret_store = SecretStore(MemoryKube(), "kvstrata-system", bytes, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    return Watches(store, SecretWatch(store, secret_store), enqueue, service_monitors, lambda: None, ()).registry()


def handlers(registry: kopf.OperatorRegistry) -> list[Any]:
    return list(registry._watching._handlers)


@pytest.mark.parametrize("service_monitors", [True, False])
def test_every_kind_is_watched_once(store: Store, service_monitors: bool) -> None:
    found = handlers(registry_of(store, lambda keys: None, service_monitors))
    wanted = [*OWN_RESOURCES, *child_resources(service_monitors), SECRET]
    assert len(found) == len(wanted) == expected_watchers(0, service_monitors)
    assert {handler.selector.any_name for handler in found} == {resource.plural for resource in wanted}


def test_only_the_operators_own_children_are_watched(store: Store) -> None:
    children = {resource.plural for resource in (*child_resources(True), SECRET)}
    for handler in handlers(registry_of(store, lambda keys: None, True)):
        labels = dict(handler.labels or {})
        assert (labels == {"app.kubernetes.io/managed-by": "kvstrata"}) == (handler.selector.any_name in children)


async def test_events_reach_the_store_and_the_queue(store: Store) -> None:
    asked: list[Key] = []
    observe = handlers(registry_of(store, asked.extend, False))[0].fn
    raw = policy("acme")
    raw["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    await observe(event={"type": "ADDED", "object": raw})
    assert Key("TenantCachePolicy", NAMESPACE, "acme") in asked
    assert "acme" in store.world(NAMESPACE).policies
    asked.clear()
    gone = {**raw, "metadata": {**raw["metadata"], "resourceVersion": "9"}}
    await observe(event={"type": "DELETED", "object": gone})
    assert Key("CacheDomain", NAMESPACE, "default") in asked
    assert "acme" not in store.world(NAMESPACE).policies


async def test_events_of_secrets_reach_their_owners_and_no_others() -> None:
    simulation = Simulation(model())
    simulation.come_to_rest()
    asked: list[Key] = []
    registry = Watches(simulation.store, simulation.secret_watch, asked.extend, False, lambda: None, ()).registry()
    (observe,) = (one.fn for one in handlers(registry) if one.selector.any_name == "secrets")
    raw = simulation.kube.objects[("Secret", NAMESPACE, "kvs-tiny-gate-tls")]
    await observe(event={"type": "MODIFIED", "object": raw})
    assert asked == [], "its own write is no news"
    gone = {**raw, "metadata": {**raw["metadata"], "resourceVersion": "9999"}}
    await observe(event={"type": "DELETED", "object": gone})
    assert asked == [Key("CachedModel", NAMESPACE, "tiny")]


@pytest.mark.parametrize("resource", [*child_resources(True), SECRET], ids=lambda resource: resource.plural)
def test_what_the_operator_makes_is_selected_by_the_api_server(resource: Resource) -> None:
    selectors = build_settings(70.0, ()).watching.label_selectors
    (made,) = (one for one in selectors if one.any_name == resource.plural)
    assert selectors[made] == "app.kubernetes.io/managed-by=kvstrata"


def test_kopf_posts_no_events_of_its_own() -> None:
    assert not build_settings(70.0, ()).posting.enabled


def test_a_namespace_that_is_named_is_watched_while_it_is_deleted() -> None:
    assert build_settings(70.0, (NAMESPACE,)).scanning.disabled
    assert not build_settings(70.0, ()).scanning.disabled


def test_a_watch_that_says_nothing_is_given_up_after_the_time_that_is_set() -> None:
    assert build_settings(12.0, ()).watching.inactivity_timeout == 12.0


async def test_an_edit_queues_bundles_before_all_that_reports_on_them() -> None:
    simulation = Simulation(model(), model("other"), policy("acme"))
    simulation.come_to_rest()
    queue = WorkQueue(lambda: 0.0)
    registry = Watches(simulation.store, simulation.secret_watch, queue.add_all, False, lambda: None, ()).registry()
    observe = handlers(registry)[0].fn
    raw = simulation.kube.objects[("TenantCachePolicy", NAMESPACE, "acme")]
    newer = {"resourceVersion": "9999", "generation": raw["metadata"]["generation"] + 1}
    await observe(event={"type": "MODIFIED", "object": {**raw, "metadata": {**raw["metadata"], **newer}}})
    kinds = [(await queue.take()).kind for _ in range(len(queue))]
    assert kinds[:2] == [BUNDLE, BUNDLE]
    assert set(kinds[2:]) == {"TenantCachePolicy", "CacheDomain"}

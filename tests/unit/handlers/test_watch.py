"""The watches feed the store and the queue, and write nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import kopf
import pytest

from kvstrata.adapters.resources import OWN_RESOURCES, child_resources
from kvstrata.handlers.watch import build_registry, build_settings, expected_watchers
from kvstrata.model.refs import Key
from kvstrata.reconcile.store import Store
from tests.support.objects import NAMESPACE, policy


@pytest.fixture
def store() -> Store:
    return Store(lambda: bytes(64), lambda: datetime(2026, 1, 1, tzinfo=UTC))


def handlers(registry: kopf.OperatorRegistry) -> list[Any]:
    return list(registry._watching._handlers)


@pytest.mark.parametrize("service_monitors", [True, False])
def test_every_kind_is_watched_once(store: Store, service_monitors: bool) -> None:
    found = handlers(build_registry(store, lambda key: None, service_monitors))
    wanted = [*OWN_RESOURCES, *child_resources(service_monitors)]
    assert len(found) == len(wanted) == expected_watchers(0, service_monitors)
    assert {handler.selector.any_name for handler in found} == {resource.plural for resource in wanted}


def test_only_the_operators_own_children_are_watched(store: Store) -> None:
    children = {resource.plural for resource in child_resources(True)}
    for handler in handlers(build_registry(store, lambda key: None, True)):
        labels = dict(handler.labels or {})
        assert (labels == {"app.kubernetes.io/managed-by": "kvstrata"}) == (handler.selector.any_name in children)


async def test_events_reach_the_store_and_the_queue(store: Store) -> None:
    asked: list[Key] = []
    observe = handlers(build_registry(store, asked.append, False))[0].fn
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


def test_kopf_posts_no_events_of_its_own() -> None:
    assert not build_settings().posting.enabled

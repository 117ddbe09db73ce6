"""A server whose memory cannot be put under the policy does not start, and says why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata_sidecar.adapter.params import AdapterParams, MemoryParams
from kvstrata_sidecar.upstream import server_checks as checks

POD = {"domain": "d" * 16, "identity": "1" * 16}


class TestParams:
    def test_they_are_the_pods_and_the_cpu_tiers(self) -> None:
        params = MemoryParams.from_json(POD | {"tier": "dram", "high_watermark_percent": 75, "link_dir": "/link"})
        assert params == MemoryParams(AdapterParams("d" * 16, "1" * 16, None, link_dir="/link"), "dram", 75)
        assert MemoryParams.from_json(POD | {"tier": None}).high_watermark_percent == 90

    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"tier": ""}, "tier must be"),
            ({"tier": 7}, "tier must be"),
            ({"high_watermark_percent": 101}, "from 10 to 100"),
            ({"high_watermark_percent": 9}, "from 10 to 100"),
            ({"high_watermark_percent": True}, "from 10 to 100"),
            ({"high_watermark_percent": 50.0}, "from 10 to 100"),
            ({"domain": "x"}, "domain"),
            ({"unheard_of": 1}, "unheard_of"),
        ],
    )
    def test_a_malformed_field_is_named(self, changed: dict[str, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            MemoryParams.from_json(POD | {"tier": "dram"} | changed)

    def test_the_tier_has_to_be_named_even_if_there_is_none(self) -> None:
        with pytest.raises(ValueError, match="null is a model without a CPU tier"):
            MemoryParams.from_json(POD)


class Memory: ...


class Manager:
    def __init__(self) -> None:
        self._objects: dict[Any, Any] = {}
        self._staging: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._memory_manager: Any = Memory()
        self._read_ttl_seconds = 300


def server(policy: str = "noop") -> Any:
    controller = SimpleNamespace(report_status=lambda: {"eviction_policy": policy})
    return SimpleNamespace(_l1_managers_by_id={0: Manager()}, _eviction_controllers=[controller])


def without(name: str) -> Callable[[Any], None]:
    return lambda server: delattr(server._l1_managers_by_id[0], name)


class TestManager:
    def test_the_server_that_is_known_is_taken(self) -> None:
        known = server()
        assert checks.the_manager(known, Manager, Memory) is known._l1_managers_by_id[0]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda s: delattr(s, "_l1_managers_by_id"), "_l1_managers_by_id"),
            (lambda s: s._l1_managers_by_id.update({1: Manager()}), "this server has 2"),
            (lambda s: s._l1_managers_by_id.update({0: object()}), "Manager"),
            (without("_objects"), "_objects"),
            (without("_staging"), "_staging"),
            (without("_lock"), "_lock"),
            (without("_read_ttl_seconds"), "_read_ttl_seconds"),
            (lambda s: setattr(s._l1_managers_by_id[0], "_memory_manager", object()), "render no GDS"),
            (lambda s: delattr(s, "_eviction_controllers"), "_eviction_controllers"),
        ],
    )
    def test_what_is_not_as_expected_is_named(self, change: Callable[[Any], None], says: str) -> None:
        changed = server()
        change(changed)
        with pytest.raises(checks.IncompatibleServerError, match=says):
            checks.the_manager(changed, Manager, Memory)

    def test_lmcaches_own_eviction_is_refused_because_it_knows_no_guarantee(self) -> None:
        with pytest.raises(checks.IncompatibleServerError, match="--eviction-policy noop, not LRU"):
            checks.the_manager(server("LRU"), Manager, Memory)


class TestStoreListener:
    class Listener:
        def on_l1_keys_write_finished(self, keys: list[Any]) -> None: ...

    def test_it_is_found_among_others(self) -> None:
        listener = self.Listener()
        manager = SimpleNamespace(_registered_listeners=[object(), listener])
        assert checks.the_store_listener(manager, self.Listener) is listener

    @pytest.mark.parametrize("listeners", [None, [], [object()], [Listener(), Listener()]])
    def test_a_server_without_just_one_does_not_start(self, listeners: object) -> None:
        with pytest.raises(checks.IncompatibleServerError, match="_registered_listeners"):
            checks.the_store_listener(SimpleNamespace(_registered_listeners=listeners), self.Listener)


class TestHasher:
    def test_it_is_the_servers_own(self) -> None:
        hasher = SimpleNamespace(chunk_size=16, compute_chunk_hashes=list)
        assert checks.the_hasher(SimpleNamespace(token_hasher=hasher)) == (16, list)

    @pytest.mark.parametrize(
        "hasher",
        [None, SimpleNamespace(chunk_size=16), SimpleNamespace(chunk_size=0, compute_chunk_hashes=list)],
    )
    def test_a_server_that_does_not_say_how_it_names_chunks_does_not_start(self, hasher: object) -> None:
        with pytest.raises(checks.IncompatibleServerError, match="token_hasher"):
            checks.the_hasher(SimpleNamespace(token_hasher=hasher))

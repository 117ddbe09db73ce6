"""Parameters: what is malformed stops the server, and secrets have no place."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvstrata_sidecar.adapter.params import AdapterParams, Endpoint, FileTierParams, TierParams, TlsParams
from tests.tiers.gate_stand_in import DOMAIN, IDENTITY

TIER: dict[str, Any] = {"name": "shared", "endpoints": [{"host": "redis", "port": 6379}]}
POD: dict[str, Any] = {"domain": DOMAIN, "identity": IDENTITY, "tier": TIER}


def test_everything_that_can_be_said_is_read() -> None:
    tier = TIER | {
        "tls": {"ca_file": "/ca.crt", "server_name": "redis.internal"},
        "username": "data",
        "password_file": "/password",
        "store_deadline_ms": 120_000,
    }
    params = AdapterParams.from_json(POD | {"tier": tier})
    assert params.tier == TierParams(
        name="shared",
        endpoints=(Endpoint("redis", 6379),),
        tls=TlsParams("/ca.crt", "redis.internal"),
        username="data",
        password_file="/password",
        store_deadline_ms=120_000,
    )
    assert params.policy_dir == "/run/kvstrata/policy"


def test_a_pod_without_a_shared_tier_is_said_by_null() -> None:
    assert AdapterParams.from_json(POD | {"tier": None}).tier is None


@pytest.mark.parametrize(
    "broken",
    [
        {},
        POD | {"domain": "short"},
        POD | {"identity": "G" * 16},
        POD | {"identity": 7},
        POD | {"surprise": 1},
        {name: value for name, value in POD.items() if name != "tier"},
        POD | {"tier": {}},
        POD | {"tier": TIER | {"endpoints": []}},
        POD | {"tier": TIER | {"endpoints": [{"host": "redis"}]}},
        POD | {"tier": TIER | {"password": "secret"}},
        POD | {"tier": TIER | {"tls": {}}},
        POD | {"tier": TIER | {"workers": 0}},
        POD | {"tier": TIER | {"lookup_deadline_ms": 0.5}},
        POD | {"tier": TIER | {"store_deadline_ms": 300_000}},
    ],
)
def test_malformed_parameters_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        AdapterParams.from_json(broken)


def test_no_parameter_can_hold_a_secret() -> None:
    assert not {field.name for field in fields(TierParams)} & {"password", "secret", "token", "key"}


FILES = {"medium": "NVMe", "name": "disk", "directory": "/files", "capacity_bytes": 1 << 30, "max_blocks": 4096}


def test_the_medium_says_what_kind_of_tier_it_is() -> None:
    params = AdapterParams.from_json({"domain": "0" * 16, "identity": "1" * 16, "tier": FILES})
    assert params.tier == FileTierParams("disk", "/files", 1 << 30, 4096)
    redis = {"medium": "Redis", "name": "shared", "endpoints": [{"host": "a", "port": 1}]}
    assert isinstance(
        AdapterParams.from_json({"domain": "0" * 16, "identity": "1" * 16, "tier": redis}).tier, TierParams
    )


@pytest.mark.parametrize(
    "change",
    [
        {"medium": "Tape"},
        {"directory": "files"},
        {"directory": 7},
        {"capacity_bytes": 0},
        {"max_blocks": None},
        {"free_floor_percent": 100},
        {"free_floor_percent": True},
        {"default_ttl_s": 0},
        {"encryption": "Maybe"},
        {"store_deadline_ms": 120_001},
        {"lookup_deadline_ms": 5},
        {"place": "../other"},
        {"place": ""},
        {"place": "chat", "name": ".."},
    ],
)
def test_malformed_parameters_of_files_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        AdapterParams.from_json({"domain": "0" * 16, "identity": "1" * 16, "tier": FILES | change})

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.api.cachetier import CacheTier
from kvstrata.api.scalars import Quantity
from kvstrata.objects import paths
from kvstrata.objects.pod import engine
from kvstrata.objects.pod.pod import pod_template
from kvstrata.objects.tier_link import redis_link
from kvstrata_sidecar.adapter.params import AdapterParams, MemoryParams
from kvstrata_sidecar.gate.http.drain import DRAINED_FILE, DRAINING_FILE
from kvstrata_sidecar.gate.settings import Settings, load
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, IDENTITY, cpu_tier, model, nvme_tier, redis_tier, tier


def containers(*tiers: Any, **parts: Any) -> dict[str, dict[str, Any]]:
    spec = pod_template(CONTEXT, DOMAIN_ID, model(**parts), tiers, IDENTITY)["spec"]
    return {container["name"]: container for container in [*spec["initContainers"], *spec["containers"]]}


def flag(container: dict[str, Any], name: str) -> str:
    args = container["args"]
    return str(args[args.index(name) + 1])


def adapters(container: dict[str, Any]) -> list[dict[str, Any]]:
    args = container["args"]
    return [json.loads(args[i + 1]) for i, arg in enumerate(args) if arg == "--l2-adapter"]


def test_gate_starts_first_then_cache_then_engine() -> None:
    spec = pod_template(CONTEXT, DOMAIN_ID, model(), (), IDENTITY)["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["plugin", "gate", "cache"]
    assert [container.get("restartPolicy") for container in spec["initContainers"]] == [None, "Always", "Always"]
    assert [container["name"] for container in spec["containers"]] == ["engine"]


def test_the_first_container_has_the_engines_amounts_and_no_device() -> None:
    """Limits and quotas of a namespace that admit the engine admit it, too."""
    asked = {
        "requests": {"cpu": "20m", "memory": "2Gi"},
        "limits": {"cpu": "1", "memory": "2Gi", "nvidia.com/gpu": "1"},
    }
    made = containers(engine={"image": "engine:1", "resources": asked})["plugin"]["resources"]
    assert made == {"requests": {"cpu": "20m", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}}


def test_only_the_gate_decides_whether_the_pod_is_ready() -> None:
    ready = {name for name, container in containers().items() if "readinessProbe" in container}
    assert ready == {"gate"}


@pytest.mark.parametrize("mode", [None, {"mode": "Disabled"}, {"mode": "Secret", "secretRef": {"name": "own"}}])
def test_the_gate_understands_its_environment(mode: dict[str, Any] | None) -> None:
    gate = containers(gate={"tls": mode} if mode else {})["gate"]
    environment = {entry["name"]: entry.get("value", "from the pod") for entry in gate["env"]}
    settings = load([], {**environment, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    ports = {port["containerPort"] for port in gate["ports"]}
    mounts = {mount["mountPath"] for mount in gate["volumeMounts"]}
    listeners = {settings.https_port, settings.http_port, settings.control_port, settings.health_port} - {-1}
    assert listeners == ports
    assert (settings.bundle_secret, settings.api_keys_secret) == ("kvs-tiny-bundle", "keys")
    assert {str(settings.tls_dir), str(settings.control_tls_dir), str(settings.ack_token_file.parent)} <= mounts
    assert {str(settings.policy_dir), str(settings.adapter_socket.parent), str(settings.engine_socket.parent)} <= mounts
    assert {str(settings.kube_token_file.parent), str(settings.kube_ca_file.parent)} <= mounts


def gate_of(limits: dict[str, Any]) -> tuple[Settings, int]:
    """Return the settings of a gate with these limits, and its memory limit."""
    gate = containers(gate={"limits": limits})["gate"]
    environment = {entry["name"]: entry.get("value", "from the pod") for entry in gate["env"]}
    settings = load([], {**environment, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    return settings, Quantity(gate["resources"]["limits"]["memory"]).in_bytes


def test_the_limits_of_a_gate_are_its_settings() -> None:
    connections = ("max_connections", "max_connections_per_address", "max_in_flight", "max_in_flight_per_tenant")
    names = ("max_body_bytes", "idle_timeout_s", *connections, "metrics_tenants")
    defaults = [Settings.__dataclass_fields__[name].default for name in names]
    assert [getattr(gate_of({})[0], name) for name in names] == defaults
    chosen = {
        "maxBodyBytes": 65536,
        "idleTimeout": "5m",
        "maxConnections": 512,
        "maxConnectionsPerAddress": 64,
        "maxInFlight": 48,
        "maxInFlightPerTenant": 24,
        "metricsTenants": 1000,
    }
    assert [getattr(gate_of(chosen)[0], name) for name in names] == [65536, 300.0, 512, 64, 48, 24, 1000]


@pytest.mark.parametrize(("most", "of_a_tenant"), [(100, 50), (3, 2), (1, 1)])
def test_a_tenant_has_half_of_the_places_of_a_gate(most: int, of_a_tenant: int) -> None:
    assert gate_of({"maxInFlight": most})[0].max_in_flight_per_tenant == of_a_tenant


@pytest.mark.parametrize(
    ("limits", "more_mib"),
    [
        ({}, 0),
        ({"maxBodyBytes": 65536, "maxConnections": 16}, 0),
        ({"maxBodyBytes": 32 * 2**20}, 24 * 28),
        ({"maxConnections": 16384}, 14 * 64),
    ],
)
def test_larger_limits_raise_the_gates_memory(limits: dict[str, Any], more_mib: int) -> None:
    assert gate_of(limits)[1] == (448 + more_mib) * 2**20


def test_a_pod_without_redis_still_has_an_adapter_that_enforces() -> None:
    (adapter,) = adapters(containers(cpu_tier())["cache"])
    params = AdapterParams.from_json(adapter["adapter_params"])
    assert (params.domain, params.identity, params.tier) == (DOMAIN_ID, IDENTITY, None)


@pytest.mark.parametrize("own", [(), (cpu_tier(),), (cpu_tier(), nvme_tier())], ids=["none", "memory", "files"])
def test_redis_tiers_come_go_and_change_without_another_template(own: tuple[CacheTier, ...]) -> None:
    external = tier("far", medium="Redis", capacity="1Gi", redis={"external": {"endpoints": ["r:1"], "username": "u"}})
    plain, sealed = redis_tier("one"), redis_tier("two", tls={"mode": "Disabled"})
    built = [
        pod_template(CONTEXT, DOMAIN_ID, model(), tiers, IDENTITY, shard_count=256)
        for tiers in (own, (*own, plain), (*own, sealed, external, plain), (plain, *own))
    ]
    assert built == built[:1] * 4


def test_an_external_tier_uses_the_keys_that_the_user_named() -> None:
    servers = {
        "endpoints": ["[2001:db8::7]:7000"],
        "tls": {"caSecretRef": {"name": "ca", "key": "root.pem"}},
        "authSecretRef": {"name": "auth"},
    }
    link = redis_link(tier("far", medium="Redis", capacity="1Gi", redis={"external": servers}))
    assert link is not None
    assert link.endpoints == (("2001:db8::7", 7000),)
    assert (link.password, link.ca) == (("auth", "password"), ("ca", "root.pem"))


def test_no_secret_reaches_arguments_or_environment() -> None:
    source = {"hub": {"repository": "a/b", "tokenSecretRef": {"name": "hub", "key": "token"}}}
    for container in containers(cpu_tier(), redis_tier(), source=source).values():
        for entry in container.get("env", []):
            assert "secretKeyRef" not in entry.get("valueFrom", {}), entry


def test_lmcache_never_evicts_by_itself() -> None:
    for tiers in ((), (cpu_tier(eviction={"highWatermarkPercent": 75}),)):
        cache = containers(*tiers)["cache"]
        assert flag(cache, "--eviction-policy") == "noop"
        assert "--eviction-trigger-watermark" not in cache["args"]


@pytest.mark.parametrize(
    ("tiers", "kept"),
    [((), []), ((redis_tier(),), []), ((cpu_tier(),), ["retain"]), ((cpu_tier(), redis_tier()), ["retain"])],
    ids=["none", "shared", "memory", "both"],
)
def test_what_comes_from_a_slower_tier_stays_in_memory_only_where_memory_is_a_tier(
    tiers: tuple[CacheTier, ...], kept: list[str]
) -> None:
    args = containers(*tiers)["cache"]["args"]
    assert [after for before, after in itertools.pairwise(args) if before == "--l2-prefetch-policy"] == kept


@pytest.mark.parametrize(
    ("tiers", "name", "percent"),
    [
        ((), None, 90),
        ((redis_tier(),), None, 90),
        ((cpu_tier(), redis_tier()), "cpu", 90),
        ((redis_tier(), cpu_tier(eviction={"highWatermarkPercent": 75})), "cpu", 75),
    ],
)
def test_the_memorys_module_understands_its_parameters_and_shares_the_adapters_pod(
    tiers: tuple[CacheTier, ...], name: str | None, percent: int
) -> None:
    cache = containers(*tiers)["cache"]
    module = json.loads(flag(cache, "--server-module"))
    assert cache["args"].count("--server-module") == 1
    assert importlib.util.find_spec(module["module_path"]) is not None
    told = MemoryParams.from_json(module["config"])
    assert (told.tier, told.high_watermark_percent) == (name, percent)
    for adapter in adapters(cache):
        assert replace(AdapterParams.from_json(adapter["adapter_params"]), tier=None) == told.pod


def test_memory_of_the_cpu_tier_counts_in_volume_and_in_both_limits() -> None:
    parts = {"engine": {"resources": {"limits": {"memory": "4Gi"}}}}
    template = pod_template(CONTEXT, DOMAIN_ID, model(**parts), (cpu_tier("2Gi"),), IDENTITY)
    shm = next(volume for volume in template["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2560Mi"}
    found = containers(cpu_tier("2Gi"), **parts)
    assert found["engine"]["resources"]["limits"]["memory"] == "6Gi"
    assert found["cache"]["resources"]["limits"]["memory"] == "3584Mi"
    assert flag(found["cache"], "--l1-size-gb") == "2"


@pytest.mark.parametrize(("asked", "ranks", "devices"), [(1, 4, "4"), (4, 4, "4"), (8, 4, "8")])
def test_a_replica_gets_an_accelerator_for_each_rank(asked: int, ranks: int, devices: str) -> None:
    resources = {"limits": {"nvidia.com/gpu": asked}}
    built = containers(engine={"resources": resources, "tensorParallelSize": ranks})["engine"]
    assert built["resources"]["limits"]["nvidia.com/gpu"] == devices
    assert built["resources"]["requests"]["nvidia.com/gpu"] == devices
    assert flag(built, "--tensor-parallel-size") == str(ranks)


def test_the_cache_container_claims_no_accelerator() -> None:
    cache = containers(engine={"resources": {"limits": {"nvidia.com/gpu": 1}}})["cache"]
    assert "nvidia.com/gpu" not in json.dumps(cache)


def test_the_users_labels_never_replace_the_operators() -> None:
    chosen = {"labels": {"team": "a"}, "annotations": {"kvstrata.io/identity": "forged", "note": "x"}}
    metadata = pod_template(CONTEXT, DOMAIN_ID, model(engine={"podTemplate": chosen}), (), IDENTITY)["metadata"]
    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["kvstrata.io/model"] == "tiny"
    assert metadata["annotations"] == {"kvstrata.io/identity": IDENTITY, "note": "x"}


def test_the_users_variables_stand_over_defaults_once() -> None:
    built = containers(engine={"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}, {"name": "EMPTY"}]})["engine"]
    assert [entry for entry in built["env"] if entry["name"] == "HF_HUB_OFFLINE"] == [
        {"name": "HF_HUB_OFFLINE", "value": "0"}
    ]
    assert {"name": "EMPTY"} in built["env"]


def test_a_model_from_the_hub_may_go_online_and_a_local_one_may_not() -> None:
    def variables(**parts: Any) -> dict[str, str]:
        return {entry["name"]: entry.get("value", "") for entry in containers(**parts)["engine"]["env"]}

    assert variables()["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in variables(source={"hub": {"repository": "a/b"}})
    assert "HF_HUB_OFFLINE" not in variables(model={"tokenizer": "a/b"})


class TestTheDrainHook:
    def run(self, directory: Path, seconds: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", engine.DRAIN_SCRIPT, str(directory), seconds])

    def test_announces_itself_and_waits_for_the_gate(self, tmp_path: Path) -> None:
        hook = self.run(tmp_path, "600")
        give_up_at_s = time.monotonic() + 60
        while not (tmp_path / DRAINING_FILE).exists():
            assert time.monotonic() < give_up_at_s
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            hook.wait(0.5)
        (tmp_path / DRAINED_FILE).touch()
        assert hook.wait(60) == 0

    def test_does_not_wait_for_ever(self, tmp_path: Path) -> None:
        assert self.run(tmp_path, "0.2").wait(60) == 0

    def test_leaves_the_engine_time_to_stop(self) -> None:
        spec = pod_template(CONTEXT, DOMAIN_ID, model(), (), IDENTITY)["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[-2:] == [paths.ENGINE, str(engine.DRAIN_TIMEOUT_S)]
        assert spec["terminationGracePeriodSeconds"] >= engine.DRAIN_TIMEOUT_S + 20

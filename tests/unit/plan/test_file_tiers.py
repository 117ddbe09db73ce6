"""NVMe tiers: rendered into pods, and judged by what pods say of their files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.objects.pod import nvme
from kvstrata.objects.quantities import GIB, MIB
from tests.support.objects import NAMESPACE, model, own, pod, policy
from tests.support.worlds import Simulation

USED = TierState("disk", "NVMe", "closed", encrypted=True, capacity_bytes=GIB * 9 // 10, used_bytes=GIB // 2)


def file_tier(**spec: Any) -> dict[str, Any]:
    return own("CacheTier", "disk", {"medium": "NVMe", "capacityPerPod": "1Gi", "nvme": {"emptyDir": {}}} | spec)


def serving(*objects: Any, said: TierState | None = USED) -> Simulation:
    simulation = Simulation(*(objects or (file_tier(), model(tiers=("disk",)), policy("acme"))))
    simulation.settle()
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    if said is not None:
        simulation.ack("pod-0", tiers=(said,))
        simulation.settle()
    assert simulation.unsettled() == {}
    return simulation


def condition(simulation: Simulation, name: str) -> tuple[str, str]:
    return simulation.condition("CacheTier", "disk", name)


class TestConditions:
    def test_a_tier_whose_pods_use_their_files_is_ready_and_keeps_its_promises(self) -> None:
        simulation = serving()
        assert condition(simulation, "Ready") == ("True", "InPod")
        assert condition(simulation, "BackendReachable") == ("True", "Reachable")
        assert condition(simulation, "HasRoom") == ("True", "RoomLeft")
        assert condition(simulation, "Encrypted") == ("True", "KeysHeld")
        assert condition(simulation, "CapacityCommitted") == ("", ""), "nothing is guaranteed"
        assert simulation.status("CacheTier", "disk")["used"] == "512Mi"
        assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("True", "TiersBound")

    @pytest.mark.parametrize(
        ("said", "name", "expected"),
        [
            ({"breaker": "open", "detail": "cannot write"}, "BackendReachable", ("False", "PodsDisconnected")),
            ({"full": True}, "HasRoom", ("False", "DiskFull")),
            ({"read_only": True}, "HasRoom", ("False", "DiskReadOnly")),
            ({"floor_reached": True}, "HasRoom", ("False", "FloorReached")),
            ({"keyless": 1}, "Encrypted", ("False", "AwaitingKeys")),
        ],
    )
    def test_what_a_pod_says_of_its_disk_is_told(
        self, said: dict[str, Any], name: str, expected: tuple[str, str]
    ) -> None:
        simulation = serving(said=replace(USED, **said))
        assert condition(simulation, name) == expected
        assert condition(simulation, "Ready")[0] == "True", "what a disk does not take costs hits and nothing else"

    def test_a_folder_of_a_node_is_not_called_encrypted_before_pods_have_read_it(self) -> None:
        tier = file_tier(nvme={"hostPath": {"path": "/mnt/kv"}})
        simulation = serving(tier, model(tiers=("disk",)), policy("acme"), said=replace(USED, recovering=True))
        assert condition(simulation, "Encrypted") == ("False", "PlaintextLeft")
        simulation.ack("pod-0", tiers=(USED,))
        simulation.settle()
        assert condition(simulation, "Encrypted") == ("True", "KeysHeld")

    def test_a_new_volume_holds_nothing_that_a_tier_left_behind(self) -> None:
        assert condition(serving(said=replace(USED, recovering=True)), "Encrypted") == ("True", "KeysHeld")

    def test_without_pods_there_is_nothing_to_judge(self) -> None:
        simulation = Simulation(file_tier(), model(tiers=("disk",)))
        simulation.settle()
        for name in ("BackendReachable", "HasRoom", "Encrypted"):
            assert condition(simulation, name) == ("", "")

    def test_its_retention_is_kept_by_pods(self) -> None:
        simulation = serving(file_tier(maxRetention="1h"), model(tiers=("disk",)), policy("acme"))
        assert condition(simulation, "RetentionKept") == ("True", "RemovedInTime")


class TestFolders:
    """Which folders of nodes the tiers of a namespace may name."""

    def judged(self, path: str, folders: tuple[str, ...] | None) -> tuple[str, str]:
        simulation = Simulation(file_tier(nvme={"hostPath": {"path": path}}), model(tiers=("disk",)))
        simulation.store.allowed_folders = folders
        simulation.come_to_rest()
        bound = simulation.condition("CachedModel", "tiny", "TiersBound")
        assert (bound == ("False", "TierStalled")) is (condition(simulation, "Stalled")[0] == "True")
        pods = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]["spec"]["template"]["spec"]
        volumes = [one["hostPath"]["path"] for one in pods["volumes"] if "hostPath" in one]
        assert volumes == ([path] if condition(simulation, "Ready")[0] == "True" else [])
        return condition(simulation, "Ready")

    @pytest.mark.parametrize("path", [f"/disks/{NAMESPACE}", f"/disks/{NAMESPACE}/", f"/ssd/{NAMESPACE}"])
    def test_the_one_of_the_namespace_is_used(self, path: str) -> None:
        assert self.judged(path, ("/disks", "/ssd")) == ("True", "InPod")

    @pytest.mark.parametrize(
        "path",
        ["/disks", "/disks/other", *(f"/disks/{NAMESPACE}{more}" for more in ("2", "/link", "/../other")), "/"],
    )
    def test_others_are_refused_by_name(self, path: str) -> None:
        assert self.judged(path, ("/disks", "/ssd")) == ("False", "FolderNotAllowed")

    def test_without_one_in_the_chart_none_is_used_and_the_remedy_is_named(self) -> None:
        assert self.judged("/disks", ()) == ("False", "FolderNotAllowed")
        simulation = Simulation(file_tier(nvme={"hostPath": {"path": "/etc"}}))
        for folders, remedy in (((), "hostPaths of the chart"), (("/disks", "/ssd"), f"/disks/{NAMESPACE} or /ssd/")):
            simulation.store.allowed_folders = folders
            simulation.edit("CacheTier", "disk", maxRetention=f"{len(folders) + 1}h")
            simulation.come_to_rest()
            conditions = simulation.status("CacheTier", "disk")["conditions"]
            assert all(remedy in one["message"] for one in conditions if one["type"] == "Ready")


class TestBudgets:
    def budgeted(self, said: TierState | None) -> Simulation:
        tiers = [{"tier": "disk", "limit": "512Mi", "guaranteed": "256Mi", "retention": "10m"}]
        return serving(file_tier(), model(tiers=("disk",)), policy("acme", budgets=tiers), said=said)

    def test_they_are_enforced_where_pods_say_that_they_divide_the_capacity(self) -> None:
        simulation = self.budgeted(USED)
        assert simulation.condition("TenantCachePolicy", "acme", "WithinBudget") == ("True", "BudgetsEnforced")
        (budget,) = simulation.entry("acme").budgets
        assert (budget.limit_bytes, budget.guaranteed_bytes, budget.retention_s) == (512 * MIB, 256 * MIB, 600)
        assert simulation.status("CacheTier", "disk")["guaranteed"] == "256Mi"

    def test_a_pod_that_knows_no_files_keeps_none(self) -> None:
        simulation = self.budgeted(TierState("disk", "Redis", "closed", capacity_bytes=1))
        told = simulation.condition("TenantCachePolicy", "acme", "WithinBudget")
        assert told == ("Unknown", "BudgetsNotEnforced")

    def test_what_a_scope_holds_is_that_of_the_pod_with_most_and_nothing_when_none_names_it(self) -> None:
        simulation = self.budgeted(USED)
        scope = simulation.entry("acme").keyspace[:12]
        simulation.ack("pod-0", tiers=(USED,), usage=(ScopeUsage(scope, "disk", 100 * MIB, 3),))
        simulation.settle()
        (row,) = simulation.status("TenantCachePolicy", "acme")["usage"]["tiers"]
        assert (row["tier"], row["used"]) == ("disk", "100Mi")
        simulation.advance(400)
        simulation.ack("pod-0", tiers=(USED,), usage=())
        simulation.enqueue_all()
        simulation.settle()
        (row,) = simulation.status("TenantCachePolicy", "acme")["usage"]["tiers"]
        assert row["used"] == "0"


class TestKeys:
    def test_an_encrypted_tier_of_files_has_data_keys_drawn(self) -> None:
        assert serving().entry("acme").keys

    def test_a_plain_one_has_not(self) -> None:
        plain = file_tier(encryption="Disabled")
        assert not serving(plain, model(tiers=("disk",)), policy("acme"), said=None).entry("acme").keys


class TestRendering:
    def container(self, *objects: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        simulation = Simulation(*objects)
        simulation.settle()
        spec = simulation.kube.objects["Deployment", NAMESPACE, "kvs-tiny"]["spec"]["template"]["spec"]
        return spec, next(one for one in spec["initContainers"] if one["name"] == "cache")

    def test_no_other_container_sees_the_files(self) -> None:
        spec, cache = self.container(file_tier(), model(tiers=("disk",)))
        assert {"name": "nvme-disk", "mountPath": "/run/kvstrata/nvme/disk"} in cache["volumeMounts"]
        others = [one for one in (*spec["initContainers"], *spec["containers"]) if one["name"] != "cache"]
        assert not any(mount["name"] == "nvme-disk" for one in others for mount in one["volumeMounts"])

    def test_a_folder_of_the_node_has_to_be_there_and_pods_take_places_in_it(self) -> None:
        spec, cache = self.container(file_tier(nvme={"hostPath": {"path": "/disks/a"}}), model(tiers=("disk",)))
        volume = next(one for one in spec["volumes"] if one["name"] == "nvme-disk")
        assert volume["hostPath"] == {"path": "/disks/a", "type": "Directory"}
        assert '"place":"tiny"' in next(one for one in cache["args"] if '"NVMe"' in one)
        assert "ephemeral-storage" not in cache["resources"]["requests"]

    def test_the_scheduler_is_asked_for_what_the_files_take_of_the_node_whatever_resources_are_chosen(self) -> None:
        _, cache = self.container(file_tier(), model(tiers=("disk",)))
        assert cache["resources"]["requests"]["ephemeral-storage"] == "1Gi"
        assert "ephemeral-storage" not in cache["resources"]["limits"]
        chosen = {"resources": {"requests": {"cpu": "1"}}}
        _, cache = self.container(file_tier(), model(tiers=("disk",), cacheServer=chosen))
        assert cache["resources"]["requests"] == {"cpu": "1", "ephemeral-storage": "1Gi"}
        chosen = {"resources": {"requests": {"ephemeral-storage": "5Gi"}}}
        _, cache = self.container(file_tier(), model(tiers=("disk",), cacheServer=chosen))
        assert cache["resources"]["requests"] == {"ephemeral-storage": "5Gi"}

    @pytest.mark.parametrize(("capacity", "blocks"), [("16Mi", 1 << 14), ("100Gi", 409_600), ("4Ti", 1 << 20)])
    def test_the_index_is_bounded_and_paid_for(self, capacity: str, blocks: int) -> None:
        simulation = Simulation(file_tier(capacityPerPod=capacity))
        tier = simulation.world.tiers["disk"]
        assert nvme.max_blocks(tier) == blocks
        assert nvme.index_bytes([tier]) >= 570 * blocks

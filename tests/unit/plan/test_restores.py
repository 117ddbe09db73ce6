"""Whether loading a tier's hits pays, as pods report it."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.contract.messages.adapter import RestoreState, TierState
from tests.support.objects import model, own, pod, policy
from tests.support.worlds import Simulation

MEASURED = RestoreState(
    restored=1234, declined=0, given_up=1, saved_ms=90_000, avoided_ms=0, lost_ms=500, bytes_per_s=123_456_789,
    tokens_per_s=4000, prefill_tokens_per_s=500,
)  # fmt: skip
TIER = TierState("disk", "NVMe", "closed", encrypted=True)


def serving(**reported: TierState) -> Simulation:
    tier = own("CacheTier", "disk", {"medium": "NVMe", "capacityPerPod": "1Gi", "nvme": {"emptyDir": {}}})
    simulation = Simulation(tier, model(tiers=("disk",)), policy("acme"))
    simulation.settle()
    for name in reported:
        simulation.put(pod(name.replace("_", "-")))
    simulation.come_to_rest()
    for name, state in reported.items():
        simulation.ack(name.replace("_", "-"), tiers=(state,))
    simulation.settle()
    assert simulation.unsettled() == {}
    return simulation


def test_the_condition_is_absent_until_a_pod_has_measured_both_loads_and_prefill() -> None:
    simulation = serving(pod_0=replace(TIER, restore=replace(MEASURED, prefill_tokens_per_s=0)))
    assert simulation.condition("CacheTier", "disk", "RestorePays") == ("", "")
    assert "restores" not in simulation.status("CacheTier", "disk")


def test_the_status_shows_what_loads_saved() -> None:
    simulation = serving(pod_0=replace(TIER, restore=MEASURED), pod_1=replace(TIER, restore=MEASURED))
    assert simulation.condition("CacheTier", "disk", "RestorePays") == ("True", "FasterThanPrefill")
    assert simulation.status("CacheTier", "disk")["restores"] == {
        "loaded": 2500, "declined": 0, "savedSeconds": 180, "avoidedSeconds": 0, "bytesPerSecond": 120_000_000,
        "tokensPerSecond": 4000, "prefillTokensPerSecond": 500,
    }  # fmt: skip


def test_a_pod_that_computes_what_the_tier_holds_is_named_and_the_tier_stays_ready() -> None:
    slow = replace(MEASURED, declined=70, avoided_ms=500_000, tokens_per_s=50)
    simulation = serving(pod_0=replace(TIER, restore=MEASURED), pod_1=replace(TIER, restore=slow, declining=True))
    assert simulation.condition("CacheTier", "disk", "RestorePays") == ("False", "SlowerThanPrefill")
    found = simulation.status("CacheTier", "disk")
    assert (found["restores"]["declined"], found["restores"]["avoidedSeconds"]) == (70, 500)
    message = next(one["message"] for one in found["conditions"] if one["type"] == "RestorePays")
    assert "1 of 2 pods (pod-1)" in message
    assert simulation.condition("CacheTier", "disk", "Ready")[0] == "True"


def test_figures_that_hardly_changed_are_not_written_again() -> None:
    simulation = serving(pod_0=replace(TIER, restore=MEASURED))
    before = simulation.status("CacheTier", "disk")
    simulation.ack("pod-0", tiers=(replace(TIER, restore=replace(MEASURED, restored=1236, saved_ms=90_400)),))
    simulation.settle()
    assert simulation.status("CacheTier", "disk") == before

"""PrefixPools up to their manifest: what they say, and what pods make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.api.reasons import PoolReason, SharedReason
from kvstrata.contract.messages.pools import MAX_SOURCE_BYTES, RenderRefusal, WarmOutcome
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.wire import digest_bytes
from kvstrata.plan.pools.content import READ_AGAIN_S
from kvstrata.plan.pools.rendering import ASK_AGAIN_S, RENDER_AGAIN_S
from tests.support.objects import Raw, config_map, cpu_tier, model, pod, redis_tier
from tests.support.worlds import Killed, Simulation
from tests.unit.plan.rendered_pools import (
    KIND,
    OTHER,
    TEXT,
    message,
    prefixes,
    publish,
    reason,
    rendered_by,
    sourced,
    status,
    status_writes,
    world,
)
from tools.generate.conditions import REASONS


def test_the_status_tells_what_all_pods_made_of_the_prefixes() -> None:
    simulation = world(prefixes=prefixes(TEXT, TEXT[:40], OTHER))
    said = status(simulation)
    assert [row["name"] for row in said["prefixes"]] == ["p0", "p1", "p2"]
    assert [(row["tokens"], row["chunks"]) for row in said["prefixes"]] == [(56, 3), (40, 2), (56, 3)]
    assert (said["tokens"], said["chunks"]) == (152, 6), "two chunks are in two prefixes"
    assert said["renderID"] == rendered_by(model(tiers=("cpu",)))
    assert len(said["manifestDigest"]) == 64
    assert said["scope"]["kind"] == "Pool"
    assert {name for name, _ in simulation.renderer.asked} == {"pod-0", "pod-1"}


def test_the_manifest_is_the_digest_of_its_hashes_in_order() -> None:
    simulation = world(pods=1)
    (report,) = simulation.world.renders[simulation.pod("pod-0").uid].values()
    assert report.answer is not None
    hashes = report.answer.hashes
    ordered = sorted(hashes[at : at + 32] for at in range(0, len(hashes), 32))
    assert status(simulation)["manifestDigest"] == digest_bytes(b"".join(ordered))


@pytest.mark.parametrize("pods", [0, 1])
def test_every_reason_in_a_pools_status_is_one_of_the_api(pods: int) -> None:
    reasons = {condition["reason"] for condition in status(world(pods=pods))["conditions"]}
    assert reasons <= {str(reason) for reason in REASONS[KIND]}


def test_names_order_and_repetitions_of_prefixes_are_no_new_content() -> None:
    simulation = world(prefixes=prefixes(TEXT, OTHER))
    before = status(simulation)
    asked = len(simulation.renderer.asked)
    simulation.edit(KIND, "manual", prefixes=[*reversed(prefixes(TEXT, OTHER)), {"name": "again", "text": TEXT}])
    simulation.come_to_rest()
    after = status(simulation)
    assert [after[name] for name in ("scope", "contentDigest", "manifestDigest")] == [
        before[name] for name in ("scope", "contentDigest", "manifestDigest")
    ]
    assert [row["name"] for row in after["prefixes"]] == ["p1", "p0", "again"]
    assert len(simulation.renderer.asked) == asked


def test_a_pool_at_rest_asks_and_writes_nothing() -> None:
    simulation = world(config_map("sources", text=TEXT), prefixes=sourced())
    simulation.renderer.outcome = WarmOutcome.STORED
    simulation.advance(60)
    simulation.come_to_rest()
    asked, written = len(simulation.renderer.asked), simulation.kube.writes
    simulation.advance(10 * READ_AGAIN_S)
    assert (len(simulation.renderer.asked), simulation.kube.writes) == (asked, written)


def test_a_restart_of_the_operator_writes_nothing_and_asks_every_pod_once() -> None:
    simulation = world()
    before, written = status(simulation), status_writes(simulation)
    simulation.renderer.asked.clear()
    simulation.restart()
    simulation.come_to_rest()
    assert (status(simulation), status_writes(simulation)) == (before, written)
    assert sorted(name for name, _ in simulation.renderer.asked) == ["pod-0", "pod-1"]


@pytest.mark.parametrize("after", [False, True])
def test_wherever_the_operator_dies_the_pool_ends_with_one_epoch_and_its_manifest(after: bool) -> None:
    def begun() -> Simulation:
        simulation = world(pods=1, prefixes=prefixes(OTHER))
        simulation.edit(KIND, "manual", prefixes=prefixes(TEXT))
        return simulation

    whole = begun()
    first = len(whole.plans)
    whole.come_to_rest()
    expected = {name: status(whole)[name] for name in ("contentDigest", "manifestDigest", "chunks")}
    statuses = [write for _, made in whole.plans[first:] for write in made.statuses if write.key.kind == KIND]
    written = [write.status.keys() for write in statuses]
    assert ["scope" in fields for fields in written if "manifestDigest" in fields] == [True, False]
    for number in (1, 2):
        simulation = begun()
        simulation.kill_at(number, after=after)
        with pytest.raises(Killed):
            simulation.come_to_rest()
        simulation.restart()
        simulation.come_to_rest()
        assert {name: status(simulation)[name] for name in expected} == expected
        assert status(simulation)["scope"]["rolls"] == 1


class TestSpec:
    @pytest.mark.parametrize(
        ("objects", "spec", "expected"),
        [
            ((), {"modelRef": {"name": "gone"}}, SharedReason.MODEL_NOT_FOUND),
            ((), {"tiers": [{"name": "gone"}]}, SharedReason.TIER_NOT_FOUND),
            ((redis_tier(),), {"tiers": [{"name": "shared"}]}, PoolReason.TIER_NOT_IN_MODEL),
            ((model(),), {}, PoolReason.TIER_NOT_IN_MODEL),
            ((cpu_tier(allowedClassifications=["Public"]),), {}, PoolReason.TIER_NOT_ALLOWED),
        ],
    )
    def test_what_is_named_has_to_be_there_and_able(
        self, objects: tuple[Raw, ...], spec: Raw, expected: PoolReason
    ) -> None:
        assert reason(world(*objects, **spec)) == ("True", expected)

    @pytest.mark.parametrize("arguments", [{"tools": 1}, {"depth": [1]}, {"chat_template": "x"}])
    def test_arguments_that_no_caller_may_send_are_refused(self, arguments: Raw) -> None:
        messages = [{"role": "system", "content": TEXT}]
        simulation = world(prefixes=[{"name": "p0", "messages": messages, "chatTemplateKwargs": arguments}])
        assert reason(simulation) == ("True", "TemplateArgumentsRefused")
        assert simulation.renderer.asked == []

    def test_a_prefix_that_cannot_be_sent_to_a_pod_is_refused_with_its_size(self) -> None:
        many = [{"name": "p0", "messages": [{"role": "user", "content": "x" * 262_144}] * 9}]
        simulation = world(prefixes=many)
        assert reason(simulation) == ("True", "PrefixTooLong")
        assert str(MAX_SOURCE_BYTES) in message(simulation)


class TestSources:
    def test_a_text_comes_from_a_config_map(self) -> None:
        simulation = world(config_map("sources", text=TEXT), prefixes=sourced())
        inline = world()
        assert status(simulation)["manifestDigest"] == status(inline)["manifestDigest"]

    def test_a_chat_keeps_the_order_of_its_keys(self) -> None:
        chat = {"messages": [{"role": "system", "content": TEXT}], "tools": [{"type": "function", "b": 1, "a": 2}]}
        simulation = world(config_map("sources", text=json.dumps(chat)), prefixes=sourced(form="Chat"))
        assert simulation.renderer.asked[0][1] == PrefixSource(chat=chat).digest
        assert simulation.renderer.asked[0][1] != PrefixSource(chat=json.loads(json.dumps(chat, sort_keys=True))).digest

    def test_one_that_is_not_there_is_named_and_found_when_it_appears(self) -> None:
        simulation = world(prefixes=sourced())
        assert reason(simulation) == ("True", "SourceNotFound")
        assert "ConfigMap sources" in message(simulation)
        simulation.put(config_map("sources", text=TEXT))
        simulation.advance(READ_AGAIN_S + 5)
        simulation.come_to_rest()
        assert reason(simulation, "Reconciling") == ("True", "Warming")

    def test_an_edit_of_the_pool_has_its_sources_read_at_once(self) -> None:
        simulation = world(prefixes=sourced())
        simulation.advance(5)
        simulation.put(config_map("sources", text=TEXT))
        simulation.edit(KIND, "manual", pinned=True)
        simulation.come_to_rest()
        assert reason(simulation)[1] != "SourceNotFound"
        assert "contentDigest" in status(simulation)

    def test_what_was_rendered_stays_when_its_source_is_gone(self) -> None:
        simulation = world(config_map("sources", text=TEXT), prefixes=sourced())
        before = status(simulation)
        simulation.delete("ConfigMap", "sources")
        simulation.advance(READ_AGAIN_S + 5)
        assert reason(simulation) == ("True", "SourceNotFound")
        kept = ("scope", "manifestDigest", "contentDigest", "chunks")
        assert [status(simulation)[name] for name in kept] == [before[name] for name in kept]

    @pytest.mark.parametrize(("text", "says"), [("{}", "list of messages"), ("[", "malformed"), ("", "no text")])
    def test_a_document_that_is_no_chat_is_refused_with_what_is_wrong(self, text: str, says: str) -> None:
        simulation = world(config_map("sources", text=text), prefixes=sourced(form="Chat"))
        assert reason(simulation) == ("True", "SourceRefused")
        assert says in message(simulation)

    def test_an_edited_source_is_new_content_within_a_minute(self) -> None:
        simulation = world(config_map("sources", text=TEXT), prefixes=sourced())
        before = status(simulation)
        simulation.put(config_map("sources", text=OTHER))
        simulation.advance(READ_AGAIN_S + 5)
        after = status(simulation)
        assert after["contentDigest"] != before["contentDigest"]
        assert after["scope"]["epoch"] != before["scope"]["epoch"]


class TestPods:
    @pytest.mark.parametrize(
        ("says", "expected"),
        [
            ({"refused": RenderRefusal.SOURCE_REFUSED, "hashes": b""}, PoolReason.SOURCE_REFUSED),
            ({"refused": RenderRefusal.DATED, "hashes": b""}, PoolReason.UNSTABLE_TEMPLATE),
            ({"refused": RenderRefusal.CHANGING, "hashes": b""}, PoolReason.UNSTABLE_TEMPLATE),
            ({"max_model_tokens": 56}, PoolReason.PREFIX_TOO_LONG),
            ({"tokens": 15, "hashes": b""}, PoolReason.NO_WHOLE_CHUNK),
            (
                {
                    "hashes": b"".join(n.to_bytes(32, "big") for n in range(4097)),
                    "tokens": 4097 * 16,
                    "total": 4097 * 16,
                    "max_model_tokens": 1 << 17,
                },
                PoolReason.TOO_MANY_CHUNKS,
            ),
            ({"seasoning": b"another tokenizer"}, PoolReason.REPLICAS_DISAGREE),
        ],
    )
    def test_what_nobody_but_a_person_can_mend_stalls_the_pool(self, says: Raw, expected: PoolReason) -> None:
        simulation = world(prefixes=prefixes(OTHER))
        before = status(simulation)
        everyone = ["pod-1"] if expected is PoolReason.REPLICAS_DISAGREE else ["pod-0", "pod-1"]
        simulation.renderer.overrides = dict.fromkeys(everyone, says)
        publish(simulation)
        simulation.edit(KIND, "manual", prefixes=prefixes(TEXT))
        simulation.come_to_rest()
        assert reason(simulation) == ("True", expected)
        kept = ("scope", "manifestDigest", "contentDigest", "published")
        assert [status(simulation)[name] for name in kept[:-1]] == [before[name] for name in kept[:-1]]
        assert status(simulation)["published"] is True

    def test_a_disagreement_names_the_pods(self) -> None:
        simulation = world(pods=0)
        tiny = model(tiers=("cpu",))
        simulation.renderer.overrides = {"pod-1": {"seasoning": b"other"}}
        simulation.put(*(pod(f"pod-{number}", render_id=rendered_by(tiny)) for number in range(2)))
        simulation.come_to_rest()
        assert reason(simulation) == ("True", "ReplicasDisagree")
        assert "pod-0 (" in message(simulation)
        assert "pod-1 (" in message(simulation)

    def test_no_pod_no_rendering(self) -> None:
        assert reason(world(pods=0), "Ready") == ("True", "NoLivePods")

    def test_pods_of_another_template_are_not_asked(self) -> None:
        simulation = world(pod("other", render_id="0" * 16), pods=0)
        assert reason(simulation, "Reconciling") == ("True", "RollingOut")
        assert simulation.renderer.asked == []

    def test_one_that_does_not_answer_is_waited_for_and_asked_again(self) -> None:
        simulation = world(pods=0)
        simulation.renderer.silent = {"pod-0"}
        simulation.put(pod("pod-0", render_id=rendered_by(model(tiers=("cpu",)))))
        simulation.come_to_rest()
        assert reason(simulation, "Reconciling") == ("True", "Rendering")
        simulation.renderer.silent = set()
        simulation.advance(2 * ASK_AGAIN_S)
        simulation.come_to_rest()
        assert reason(simulation, "Reconciling") == ("True", "Warming")

    def test_a_cache_server_that_started_anew_is_asked_anew(self) -> None:
        simulation = world(pods=1)
        simulation.renderer.asked.clear()
        restarted(simulation, cache_boot="another")
        simulation.advance(2 * ASK_AGAIN_S)
        assert [name for name, _ in simulation.renderer.asked] == ["pod-0"]

    def test_an_engine_that_was_away_is_asked_anew(self) -> None:
        simulation = world(pods=1)
        simulation.renderer.asked.clear()
        for ready in (False, True):
            restarted(simulation, engine_ready=ready)
            simulation.settle()
        assert [name for name, _ in simulation.renderer.asked] == ["pod-0"]

    def test_one_whose_engine_is_not_ready_is_not_asked(self) -> None:
        simulation = world(pods=1)
        simulation.renderer.asked.clear()
        restarted(simulation, cache_boot="another", engine_ready=False)
        simulation.advance(2 * ASK_AGAIN_S)
        assert simulation.renderer.asked == []

    def test_one_that_cannot_be_asked_holds_nobody_up_and_is_asked_when_it_is_back(self) -> None:
        simulation = world()
        restarted(simulation, engine_ready=False)
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.settle()
        assert status(simulation)["chunks"] == 3
        assert reason(simulation) == ("", "")
        simulation.renderer.overrides = {"pod-0": {"seasoning": b"another tokenizer"}}
        restarted(simulation, engine_ready=True)
        simulation.settle()
        assert reason(simulation) == ("True", "ReplicasDisagree")

    def test_while_nobody_can_be_asked_there_is_no_manifest(self) -> None:
        simulation = world(pods=1)
        restarted(simulation, engine_ready=False)
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.settle()
        assert reason(simulation, "Reconciling") == ("True", "Rendering")
        assert "manifestDigest" not in status(simulation)

    def test_after_hours_pods_are_asked_again_and_a_template_that_changed_is_found(self) -> None:
        simulation = world()
        before = status(simulation)
        simulation.renderer.seasoning = b"another day"
        simulation.advance(RENDER_AGAIN_S + 60)
        assert reason(simulation) == ("True", "UnstableTemplate")
        assert status(simulation)["manifestDigest"] == before["manifestDigest"]
        simulation.edit(KIND, "manual", cacheGeneration=1)
        simulation.come_to_rest()
        assert status(simulation)["manifestDigest"] != before["manifestDigest"]


def restarted(simulation: Simulation, **changes: Any) -> None:
    """Let the pod tell of another start."""
    found = simulation.pod("pod-0")
    state = replace(simulation.acks[found.uid], **changes)
    simulation.acks[found.uid] = state
    simulation._report(found, state)

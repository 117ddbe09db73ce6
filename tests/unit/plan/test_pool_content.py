"""What becomes of a pool's new content: of other prefixes, another generation, and templates that make other tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.objects import NAMESPACE, pod
from tests.support.worlds import Simulation
from tests.unit.plan.rendered_pools import (
    KIND,
    OTHER,
    TEXT,
    prefixes,
    publish,
    rendered_by,
    status,
    world,
)


class TestNewContent:
    def test_readers_keep_what_is_published_while_the_next_is_rendered(self) -> None:
        simulation = world()
        publish(simulation)
        before = status(simulation)
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.come_to_rest()
        after = status(simulation)
        assert after["scope"] == before["scope"]
        assert after["manifestDigest"] == before["manifestDigest"]
        assert after["published"] is True
        assert after["next"]["scope"]["rolls"] == before["scope"]["rolls"] + 1
        assert after["next"]["scope"]["epoch"] != before["scope"]["epoch"]
        assert after["next"]["manifestDigest"] not in (None, before["manifestDigest"])

    def test_what_is_cut_off_eagerly_is_cut_off_before_anybody_renders(self) -> None:
        simulation = world(invalidation="Eager")
        publish(simulation)
        before = status(simulation)
        simulation.renderer.silent = {"pod-0", "pod-1"}
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.come_to_rest()
        after = status(simulation)
        assert after["scope"]["epoch"] != before["scope"]["epoch"]
        assert not after.get("published")
        assert after.get("manifestDigest") is None
        assert "next" not in after

    def test_content_that_nobody_reads_is_replaced_at_once(self) -> None:
        simulation = world()
        before = status(simulation)
        simulation.edit(KIND, "manual", prefixes=prefixes(OTHER))
        simulation.come_to_rest()
        assert status(simulation)["scope"]["rolls"] == before["scope"]["rolls"] + 1
        assert "next" not in status(simulation)

    def test_a_third_content_takes_the_place_of_the_second_with_an_epoch_of_its_own(self) -> None:
        simulation = world()
        publish(simulation)
        epochs = []
        for text in (OTHER, TEXT + " Always."):
            simulation.edit(KIND, "manual", prefixes=prefixes(text))
            simulation.come_to_rest()
            epochs.append(status(simulation)["next"]["scope"])
        assert epochs[1]["rolls"] == epochs[0]["rolls"] + 1
        assert epochs[1]["epoch"] != epochs[0]["epoch"]
        assert status(simulation)["next"]["tokens"] == len(TEXT) + 8

    def test_content_that_returns_to_what_readers_have_drops_the_next(self) -> None:
        simulation = world()
        publish(simulation)
        before = status(simulation)
        for text in (OTHER, TEXT):
            simulation.edit(KIND, "manual", prefixes=prefixes(text))
            simulation.come_to_rest()
        assert "next" not in status(simulation)
        assert status(simulation)["scope"] == before["scope"]

    @pytest.mark.parametrize("published", [False, True])
    def test_a_raised_generation_draws_a_fresh_epoch_for_the_same_content(self, published: bool) -> None:
        simulation = world()
        if published:
            publish(simulation)
        before = status(simulation)
        simulation.edit(KIND, "manual", cacheGeneration=3)
        simulation.come_to_rest()
        after = status(simulation)
        newest = after["next"] if published else after
        assert newest["contentDigest"] == before["contentDigest"]
        assert newest["scope"]["epoch"] != before["scope"]["epoch"]
        assert newest["manifestDigest"] == before["manifestDigest"]
        assert after["cacheGeneration"] == 3


class TestNewTemplate:
    def rolled(self, change: Callable[[Simulation], None]) -> tuple[dict[str, Any], dict[str, Any]]:
        simulation = world()
        publish(simulation)
        before = status(simulation)
        change(simulation)
        engine = {"image": "engine:1", "replicas": 1, "args": ["--chat-template", "/other.jinja"]}
        simulation.edit("CachedModel", "tiny", engine=engine)
        newest = rendered_by(simulation.kube.objects[("CachedModel", NAMESPACE, "tiny")])
        for number in range(2):
            simulation.delete("Pod", f"pod-{number}")
            simulation.put(pod(f"pod-{number + 2}", render_id=newest))
        simulation.come_to_rest()
        assert (status(simulation).get("next") or status(simulation))["renderID"] == newest
        return before, status(simulation)

    def test_one_that_makes_the_same_tokens_changes_nothing_but_its_name(self) -> None:
        before, after = self.rolled(lambda _: None)
        assert "next" not in after
        assert after["scope"] == before["scope"]
        assert after["manifestDigest"] == before["manifestDigest"]

    def test_one_that_makes_other_tokens_is_new_content(self) -> None:
        before, after = self.rolled(lambda simulation: setattr(simulation.renderer, "seasoning", b"template"))
        assert after["scope"] == before["scope"]
        assert after["next"]["scope"]["rolls"] == before["scope"]["rolls"] + 1
        assert after["next"]["manifestDigest"] != before["manifestDigest"]
        assert after["next"]["contentDigest"] == before["contentDigest"]

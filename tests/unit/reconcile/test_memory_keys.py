"""Data keys in the operator's and the pods' memory: no object ever has one, and what nobody has is lost and said."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstrata.contract.policy.data_key import KeyReference, key_id
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE, domain, group, model, policy, redis_tier
from tests.support.worlds import Killed, Simulation

TCP = "TenantCachePolicy"
SEALED = redis_tier(encryption="Required")
OBJECTS = (domain(keyCustody="Memory"), SEALED, model(tiers=("shared",)), policy("acme"), policy("globex"))


def made(*objects: Any, pods: int = 2) -> KeyPods:
    sim = Simulation(*(objects or OBJECTS))
    sim.settle()
    found = KeyPods(sim)
    for number in range(pods):
        found.start(f"pod-{number}")
    sim.come_to_rest()
    found.lead()
    return found


def told(story: Callable[[KeyPods], Awaitable[None]], *objects: Any, pods: int = 2) -> KeyPods:
    """Let a story happen to pods that have been brought their keys."""
    found = made(*objects, pods=pods)

    async def run() -> None:
        await found.turn()
        await story(found)

    asyncio.run(run())
    return found


def epochs(sim: Simulation) -> dict[str, str]:
    return {name: sim.status(TCP, name)["scope"]["epoch"] for name in ("acme", "globex")}


def condition(sim: Simulation, kind: str) -> tuple[str, str]:
    return sim.condition("CacheDomain", "default", kind)


async def nothing(_: KeyPods) -> None:
    """Only the beginning matters."""


def restart(pods: KeyPods) -> None:
    """Another operator leads, which knows what objects and pods tell."""
    pods.sim.restart()
    pods.lead()


class TestDrawing:
    def test_bundles_name_keys_and_pods_have_them(self) -> None:
        pods = told(nothing)
        (reference,) = pods.sim.entry("acme").keys
        assert isinstance(reference, KeyReference)
        assert pods.named() == {key for held in pods.held.values() for key in held} != set()
        assert {*pods.held["pod-0"]} == {*pods.held["pod-1"]}
        assert key_id(pods.held["pod-0"][reference.id]) == reference.id
        assert condition(pods.sim, "KeysAtHand") == ("True", "KeysAtHand")
        assert pods.sim.status("CacheDomain", "default")["keyCustody"] == "Memory"
        assert pods.sim.condition(TCP, "acme", "Enforced") == ("True", "AllPodsAcknowledged")

    def test_no_object_ever_holds_a_key(self) -> None:
        pods = told(nothing)
        whole = b"".join(
            base64.b64decode(value)
            for (kind, _, _), raw in pods.sim.kube.objects.items()
            if kind == "Secret"
            for value in (raw.get("data") or {}).values()
        )
        whole += json.dumps([*pods.sim.kube.objects.values()]).encode()
        keys = [*pods.held["pod-0"].values()]
        assert len(keys) == 2
        for key in keys:
            assert not any(form in whole for form in (key, base64.b64encode(key), key.hex().encode()))

    def test_a_pod_that_starts_later_is_brought_them_and_one_that_has_them_is_left_alone(self) -> None:
        async def story(pods: KeyPods) -> None:
            before = [*pods.brought]
            pods.start("pod-2")
            await pods.turn()
            assert pods.brought == [*before, ("pod-2", 2)]

        told(story)

    def test_nobody_is_brought_a_key_whose_token_is_another_s(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.start("pod-2")
            pods.token = "token-of-pod-0"
            await pods.turn()
            assert pods.held["pod-2"] == {}
            pods.token = ""
            await pods.turn(20)
            await pods.turn()
            assert pods.held["pod-2"] == pods.held["pod-0"]

        told(story)

    def test_an_operator_that_does_not_lead_any_more_brings_nothing(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.lead(leading=False)
            pods.start("pod-2")
            await pods.turn()
            assert pods.held["pod-2"] == {}

        told(story)

    def test_a_key_goes_with_its_epoch(self) -> None:
        async def story(pods: KeyPods) -> None:
            before = pods.named()
            pods.sim.edit(TCP, "acme", cacheGeneration=2)
            await pods.turn(61)
            await pods.turn(61)
            assert len(pods.named() - before) == 1
            assert {*pods.held["pod-0"]} == pods.named()
            custody = pods.sim.memory.custody(NAMESPACE)
            (gone,) = before - pods.named()
            assert custody.epochs_of([gone]) == []
            assert gone not in pods.sim.world.data_keys.values()

        told(story)


class TestAnOperatorThatIsStartedAnew:
    def test_gets_its_keys_back_and_nobody_notices(self) -> None:
        async def story(pods: KeyPods) -> None:
            before, held, revision = epochs(pods.sim), dict(pods.held["pod-0"]), pods.bundle().root.revision
            restart(pods)
            pods.sim.settle()
            assert condition(pods.sim, "KeysAtHand") == ("False", "KeysAwaited")
            await pods.turn()
            assert condition(pods.sim, "KeysAtHand") == ("True", "KeysAtHand")
            assert (epochs(pods.sim), pods.held["pod-0"]) == (before, held)
            assert pods.bundle().root.revision == revision
            pods.start("pod-2")
            await pods.turn()
            assert pods.held["pod-2"] == held

        told(story)

    def test_gives_up_what_no_pod_has_and_the_cache_is_cold_and_status_says_so(self) -> None:
        async def story(pods: KeyPods) -> None:
            before, named = epochs(pods.sim), pods.named()
            pods.end("pod-0")
            pods.end("pod-1")
            restart(pods)
            assert pods.courier is not None
            pods.courier.follow()
            world = pods.sim.world
            assert (world.keys_awaited, len(world.keys_lost)) == (frozenset(), 3)
            pods.sim.step(next(key for key, _ in pods.sim.plans if key.kind == "CacheDomain"))
            await pods.turn()
            after = epochs(pods.sim)
            assert all(after[name] != before[name] for name in before)
            pods.start("pod-2")
            await pods.turn()
            assert pods.named().isdisjoint(named)
            assert {*pods.held["pod-2"]} == pods.named()
            assert condition(pods.sim, "KeysAtHand") == ("True", "KeysAtHand")

        told(story)

    def test_gives_up_nothing_as_long_as_a_pod_that_may_have_it_is_silent(self) -> None:
        async def story(pods: KeyPods) -> None:
            before = epochs(pods.sim)
            pods.held["pod-0"].clear()
            pods.away.add("pod-1")
            restart(pods)
            pods.silence("pod-1")
            await pods.turn(120)
            await pods.turn(120)
            assert epochs(pods.sim) == before
            assert condition(pods.sim, "KeysAtHand") == ("False", "KeysAwaited")
            pods.away.clear()
            await pods.turn()
            assert pods.held["pod-0"] == pods.held["pod-1"] != {}
            assert epochs(pods.sim) == before

        told(story)

    def test_waits_for_no_gate_that_knows_no_named_keys(self) -> None:
        async def story(pods: KeyPods) -> None:
            pods.outdated.add("pod-0")
            pods.held["pod-1"].clear()
            before = epochs(pods.sim)
            restart(pods)
            await pods.turn()
            assert epochs(pods.sim) != before

        told(story)

    def test_epochs_of_before_that_no_bundle_names_get_no_second_key(self) -> None:
        async def story(pods: KeyPods) -> None:
            public = pods.sim.status("CacheDomain", "default")["scope"]["epoch"]
            restart(pods)
            await pods.turn()
            assert pods.sim.status("CacheDomain", "default")["scope"]["epoch"] != public

        told(story)

    def test_nor_do_they_where_the_domain_could_not_be_read_at_first(self) -> None:
        async def story(pods: KeyPods) -> None:
            public = pods.sim.status("CacheDomain", "default")["scope"]["epoch"]
            slot = ("CacheDomain", NAMESPACE, "default")
            readable = pods.sim.kube.objects[slot]
            pods.sim.kube.objects[slot] = {**readable, "spec": {"keyCustody": "Nowhere"}}
            restart(pods)
            await pods.turn()
            assert pods.sim.world.domain is None
            pods.sim.put(readable)
            await pods.turn()
            await pods.sim.kms.__aexit__(None, None, None)
            assert pods.sim.status("CacheDomain", "default")["scope"]["epoch"] != public
            assert condition(pods.sim, "KeysAtHand") == ("True", "KeysAtHand")

        told(story)


def test_a_group_and_what_its_members_share_get_another_epoch_too() -> None:
    members = (group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))

    async def story(pods: KeyPods) -> None:
        before = pods.sim.status("TenantGroup", "lab")["scope"]["epoch"]
        pods.held["pod-0"].clear()
        restart(pods)
        await pods.turn()
        await pods.turn()
        after = pods.sim.status("TenantGroup", "lab")["scope"]["epoch"]
        assert after != before
        assert {pods.sim.status(TCP, name)["scope"]["epoch"] for name in ("a", "b")} == {after}
        assert {*pods.held["pod-0"]} == pods.named()

    told(story, domain(keyCustody="Memory"), SEALED, model(tiers=("shared",)), *members, pods=1)


class TestAChangeOfCustody:
    @pytest.mark.parametrize(("first", "then"), [("Memory", None), ("Memory", "Secret"), (None, "Memory")])
    def test_is_refused_while_there_are_keys_and_says_why(self, first: str | None, then: str | None) -> None:
        async def story(pods: KeyPods) -> None:
            entries = [pods.sim.entry(name) for name in ("acme", "globex")]
            pods.sim.edit("CacheDomain", "default", keyCustody=then)
            await pods.turn()
            assert condition(pods.sim, "Stalled") == ("True", "KeyCustodyInUse")
            assert [pods.sim.entry(name) for name in ("acme", "globex")] == entries
            pods.sim.edit("CacheDomain", "default", keyCustody=first)
            await pods.turn()
            assert condition(pods.sim, "Stalled")[0] == "False"

        told(story, domain(**({"keyCustody": first} if first else {})), *OBJECTS[1:])

    def test_is_carried_out_while_there_are_none(self) -> None:
        async def story(pods: KeyPods) -> None:
            assert pods.sim.status("CacheDomain", "default")["keyCustody"] == "Secret"
            pods.sim.edit("CacheDomain", "default", keyCustody="Memory")
            await pods.turn()
            assert pods.sim.status("CacheDomain", "default")["keyCustody"] == "Memory"
            pods.sim.edit("CacheTier", "shared", encryption="Required")
            await pods.turn()
            assert {*pods.held["pod-0"]} == pods.named() != set()

        told(story, domain(), redis_tier(encryption="Disabled"), *OBJECTS[2:])


@pytest.mark.parametrize("then", ["Memory", "Secret"])
def test_a_domain_in_another_s_place_keeps_its_keys_as_its_spec_says_and_takes_none_over(then: str) -> None:
    async def story(pods: KeyPods) -> None:
        before, held = epochs(pods.sim), {*pods.held["pod-0"]}
        pods.sim.delete("CacheDomain", "default")
        pods.sim.put(domain(keyCustody=then))
        for _ in range(3):
            await pods.turn()
        assert pods.sim.status("CacheDomain", "default")["keyCustody"] == then
        assert condition(pods.sim, "Stalled")[0] == "False"
        assert not {*before.values()} & {*epochs(pods.sim).values()}
        (key,) = pods.sim.entry("acme").keys
        assert isinstance(key, KeyReference) == (then == "Memory")
        assert not held & pods.named()
        assert {*pods.held["pod-0"]} == pods.named()

    told(story)


@pytest.mark.parametrize("after", [False, True])
def test_wherever_an_operator_dies_the_next_one_has_pods_with_the_keys_that_their_bundle_names(after: bool) -> None:
    async def story(pods: KeyPods) -> None:
        await pods.turn()
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await pods.turn(61)

    async def lived(number: int) -> bool:
        """Whether the operator outlived the story, in which it was to die at its write of this number."""
        pods = made(domain(keyCustody="Memory"), SEALED, model(tiers=("shared",)), policy("acme"), pods=1)
        pods.sim.kill_at(number, after=after)
        try:
            await story(pods)
        except Killed:
            restart(pods)
        else:
            return True
        for _ in range(3):
            await pods.turn(61)
        assert {*pods.held["pod-0"]} == pods.named() != set(), number
        assert condition(pods.sim, "KeysAtHand") == ("True", "KeysAtHand"), number
        assert pods.sim.condition(TCP, "acme", "Enforced")[0] == "True", number
        assert pods.sim.status(TCP, "acme")["cacheGeneration"] in (0, 1, 2)
        return False

    async def all_of_them() -> int:
        number = 1
        while not await lived(number):
            number += 1
        return number

    assert asyncio.run(all_of_them()) > 5

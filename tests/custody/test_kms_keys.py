"""A namespace whose keys a real OpenBao wraps, over a memory API server: pods are brought their keys, and the service
is sealed, emptied, or not allowed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.contract.policy.data_key import key_id
from kvstrata.reconcile.keys.wrapped_keys import WrappedKey, wrapping_key
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.kms_stories import (
    PATIENCE_S,
    TCP,
    Story,
    asked,
    at_hand,
    complete,
    domain_of,
    epochs,
    happens,
    pass_by,
    restart,
    secret_of,
)
from tests.custody.kms_stories import objects as objects
from tests.custody.kms_stories import told as told
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE, group, policy
from tests.support.worlds import Killed


def test_pods_are_brought_keys_that_no_object_holds_unwrapped(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        held = pods.held["pod-0"]
        assert held == pods.held["pod-1"]
        assert {*held} == pods.named() != set()
        assert all(key_id(key) == one for one, key in held.items())
        assert at_hand(pods) == ("True", "KeysAtHand")
        assert pods.sim.status("CacheDomain", "default")["keyCustody"] == "KMS"
        whole = json.dumps([*pods.sim.kube.objects.values()]).encode()
        whole += b"".join(
            base64.b64decode(value)
            for (kind, _, _), raw in pods.sim.kube.objects.items()
            if kind == "Secret"
            for value in (raw.get("data") or {}).values()
        )
        for key in held.values():
            assert not any(form in whole for form in (key, base64.b64encode(key), key.hex().encode()))

    told(story)


def test_a_pod_that_starts_later_is_brought_them_and_one_that_has_them_is_left_alone(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before = [*pods.brought]
        pods.start("pod-2")
        await pods.turn()
        assert pods.brought == [*before, ("pod-2", 2)]

    told(story)


def test_no_pod_is_brought_a_key_whose_token_is_another_s(told: Callable[[Story], KeyPods]) -> None:
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


def test_a_pod_that_did_not_answer_is_asked_again_after_a_while(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        pods.start("pod-2")
        pods.acknowledge("pod-2")
        pods.away.add("pod-2")
        await pods.turn(20)
        assert pods.held["pod-2"] == {}
        pods.away.clear()
        await pods.turn()
        assert pods.held["pod-2"] == pods.held["pod-0"]

    told(story)


def test_an_operator_that_does_not_lead_any_more_brings_nothing(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        pods.lead(leading=False)
        pods.start("pod-2")
        await pods.turn()
        assert pods.held["pod-2"] == {}

    told(story)


def test_an_operator_that_is_started_anew_has_them_unwrapped_although_no_pod_is_left(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before, held = epochs(pods), dict(pods.held["pod-0"])
        pods.end("pod-0")
        pods.end("pod-1")
        await pods.sim.kms.__aexit__(None, None, None)
        pods.sim.restart()
        pods.sim.settle()
        assert at_hand(pods) == ("False", "KeysUnwrapping")
        pods.lead()
        await asked(pods)
        await pods.turn()
        assert epochs(pods) == before
        pods.start("pod-2")
        await pods.turn()
        assert pods.held["pod-2"] == held
        assert at_hand(pods) == ("True", "KeysAtHand")

    told(story)


def test_a_service_that_is_sealed_is_named_and_pods_go_on(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        before, held = epochs(pods), dict(pods.held["pod-0"])
        bao.seal()
        try:
            await restart(pods)
            assert at_hand(pods) == ("False", "KeyCustodyAway")
            assert "Sealed" in pods.sim.store.domain(NAMESPACE).keys_problem
            assert (epochs(pods), pods.held["pod-0"]) == (before, held)
        finally:
            bao.unseal()
        await happens(lambda: not pods.sim.store.domain(NAMESPACE).keys_problem)
        await asked(pods)
        await pods.turn()
        assert at_hand(pods) == ("True", "KeysAtHand")
        assert pods.held["pod-0"] == held

    told(story)


def test_a_key_that_the_service_does_not_have_any_more_is_lost_and_its_epoch_replaced(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        before = epochs(pods)
        for name in bao.key_names():
            if pods.sim.world.domain_id and pods.sim.world.domain_id in name:
                bao.admin("POST", f"{MOUNT}/keys/{name}/config", {"deletion_allowed": True})
                bao.admin("DELETE", f"{MOUNT}/keys/{name}")
        await restart(pods)
        await asked(pods)
        await pods.turn()
        await asked(pods)
        await pods.turn()
        assert not {*before} & {*epochs(pods)}
        await pass_by(pods, lambda: complete(pods))

    told(story)


def test_a_group_whose_key_is_lost_gets_another_epoch_and_so_do_its_members(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        pods.sim.put(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
        await pods.turn()
        await asked(pods)
        await pods.turn()
        before = pods.sim.status("TenantGroup", "lab")["scope"]["epoch"]
        name = wrapping_key(domain_of(pods), before)
        bao.admin("POST", f"{MOUNT}/keys/{name}/config", {"deletion_allowed": True})
        bao.admin("DELETE", f"{MOUNT}/keys/{name}")
        await restart(pods)
        for _ in range(2):
            await asked(pods)
            await pods.turn()
        after = pods.sim.status("TenantGroup", "lab")["scope"]["epoch"]
        assert after != before
        assert {pods.sim.status(TCP, name)["scope"]["epoch"] for name in ("a", "b")} == {after}
        await pass_by(pods, lambda: complete(pods))

    told(story)


def kill_at(pods: KeyPods, number: int, *, after: bool) -> Callable[[], bool]:
    """Let the operator vanish at its write of this number, before the API server has it or after, whichever of its
    tasks makes it. Nothing writes afterwards. Return whether it has vanished."""
    writes = 0

    def before(verb: str, kind: str, name: str) -> None:
        nonlocal writes
        if writes == number:
            raise Killed
        writes += 1
        if writes == number and not after:
            raise Killed

    def afterwards(verb: str, kind: str, name: str) -> None:
        if writes == number:
            raise Killed

    pods.sim.kube.before_write, pods.sim.kube.after_write = before, afterwards
    return lambda: writes == number


@pytest.mark.parametrize("after", [False, True])
def test_wherever_an_operator_dies_the_next_one_has_pods_with_the_keys_that_their_bundle_names(
    told: Callable[[Story], KeyPods], after: bool
) -> None:
    outlived: list[int] = []

    async def change(pods: KeyPods) -> None:
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        for seconds in (1, 61, 61):
            await pods.turn(seconds)
            await asked(pods)

    def died_at(number: int) -> Story:
        async def story(pods: KeyPods) -> None:
            is_dead = kill_at(pods, number, after=after)
            with contextlib.suppress(Killed):
                await change(pods)
            if not is_dead():
                outlived.append(number)
                return
            await restart(pods)
            await pass_by(
                pods,
                lambda: (
                    complete(pods)
                    and at_hand(pods) == ("True", "KeysAtHand")
                    and pods.sim.condition(TCP, "acme", "Enforced")[0] == "True"
                ),
                listing=False,
            )
            assert pods.sim.status(TCP, "acme")["cacheGeneration"] in (0, 1, 2)

        return story

    number = 0
    while not outlived:
        number += 1
        told(died_at(number))
    assert number > 5


def test_a_record_that_cannot_be_opened_keeps_nobody_else_from_their_keys(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        assert acme[:1] != globex[:1]
        secret = secret_of(pods, acme)
        record = WrappedKey.decode(base64.b64decode(secret["data"][acme]))
        assert record is not None
        secret["data"][acme] = base64.b64encode(replace(record, service="another").encode()).decode()
        await restart(pods)
        await happens(lambda: globex in pods.sim.ring.ids(NAMESPACE, [globex]))
        assert at_hand(pods) == ("False", "KeyCustodyAway")
        assert "another one answers" in pods.sim.store.domain(NAMESPACE).keys_problem

    told(story)


def test_a_key_that_nobody_needs_is_deleted_in_the_service(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        def wrapping() -> int:
            return sum((pods.sim.world.domain_id or "-") in name for name in bao.key_names())

        count, before = wrapping(), pods.named()
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await pods.turn()
        await asked(pods)
        await pods.turn(61)
        await pods.turn(61)
        await asked(pods)
        assert wrapping() == count
        await pass_by(pods, lambda: complete(pods))
        (gone,) = before - pods.named()
        assert pods.sim.ring.secrets(NAMESPACE, [gone]) == []
        assert gone not in pods.sim.world.data_keys.values()

    told(story)


def test_a_service_that_the_operator_s_owner_did_not_allow_is_shown_no_token(
    bao: BaoServer, token_file: Path, told: Callable[..., KeyPods]
) -> None:
    token_file.unlink()  # a read of it would be told as NoToken

    async def story(pods: KeyPods) -> None:
        assert at_hand(pods) == ("False", "KeyCustodyAway")
        assert f"does not allow {bao.address}" in pods.sim.store.domain(NAMESPACE).keys_problem
        assert pods.held["pod-0"] == {}

    told(story, allowed=False)


def test_a_change_of_custody_is_refused_and_takes_nobody_s_keys_away(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        before, held = epochs(pods), dict(pods.held["pod-0"])
        pods.sim.edit("CacheDomain", "default", keyCustody="Secret")
        await asked(pods)
        assert pods.sim.condition("CacheDomain", "default", "Stalled") == ("True", "KeyCustodyInUse")
        await restart(pods)
        assert (epochs(pods), pods.held["pod-0"]) == (before, held)
        assert at_hand(pods) == ("True", "KeysAtHand")
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await asked(pods)
        await pods.turn()
        assert len(pods.held["pod-0"].keys() - held.keys()) == 1

    told(story)


def test_a_key_that_is_given_up_while_it_is_being_unwrapped_does_not_come_back(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        acme = epochs(pods)[0]
        await pods.sim.kms.__aexit__(None, None, None)
        pods.sim.restart()
        await asyncio.sleep(0)  # what is stored was read, and the service is being asked
        revoked = await pods.sim.kms.revoke(NAMESPACE, pods.sim.world.domain_id or "", [acme])
        assert revoked[acme] is not None
        await asked(pods)
        assert acme not in pods.sim.ring.ids(NAMESPACE, epochs(pods))
        assert acme not in pods.sim.world.data_keys

    told(story)


def test_nobody_is_asked_for_a_namespace_without_its_domain(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        bao.seal()
        try:
            await restart(pods)
            work = pods.sim.kms._namespaces[NAMESPACE]
            assert work.task is not None
            assert not work.task.done()
            assert pods.sim.store.domain(NAMESPACE).keys_unwrapping
            pods.sim.delete("CacheDomain", "default")
            pods.sim.store.domain(NAMESPACE).domains.clear()
            await asyncio.wait_for(work.task, PATIENCE_S)
            assert not pods.sim.store.domain(NAMESPACE).keys_unwrapping, "nor is a key waited for"
        finally:
            bao.unseal()

    told(story)

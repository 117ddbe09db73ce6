"""A namespace whose keys a real OpenBao wraps, over a memory API server: pods are brought their keys, and the service
is sealed, emptied, or not allowed."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.adapters.transit import TransitClient
from kvstrata.adapters.transit_tokens import TokenFile
from kvstrata.contract.datakey import key_id
from kvstrata.model.facts import Unreadable
from kvstrata.model.refs import Key
from kvstrata.objects import names
from kvstrata.plan.datakeys import epochs_in_use
from kvstrata.reconcile import metrics
from kvstrata.reconcile.custody import CustodyError
from kvstrata.reconcile.custody.kms import wrapping_key
from kvstrata.reconcile.custody.wrapped import SHARDS, WrappedKey
from tests.custody.bao_server import MOUNT, BaoServer
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE, domain, model, policy, redis_tier
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
PATIENCE_S = 60.0

Story = Callable[[KeyPods], Awaitable[None]]


@pytest.fixture
def objects(bao: BaoServer) -> tuple[dict[str, Any], ...]:
    """A namespace whose service has nothing from tests before, where domains have the same random ids."""
    bao.clear()
    kms = {
        "address": bao.address,
        "mount": MOUNT,
        "role": "kvstrata",
        "authorityConfigMapRef": {"name": "kms-authority", "key": "ca.crt"},
    }
    own = domain(keyCustody="KMS", kms=kms)
    authority = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "kms-authority", "namespace": NAMESPACE},
        "data": {"ca.crt": bao.authority_pem.decode()},
    }
    tier = redis_tier(encryption="Required")
    return authority, own, tier, model(tiers=("shared",)), policy("acme"), policy("globex")


@pytest.fixture
def told(bao: BaoServer, token_file: Path, objects: tuple[dict[str, Any], ...]) -> Callable[[Story], KeyPods]:
    """Let a story happen to pods of a namespace whose keys the service wraps."""

    def tell(story: Story, *, allowed: bool = True) -> KeyPods:
        async def run() -> KeyPods:
            sim = Simulation()
            sim.kms_addresses = (bao.address,) if allowed else ()
            sim.kms_login = lambda _: TokenFile(token_file)
            sim.restart()
            sim.put(*objects)
            pods = KeyPods(sim)
            sim.settle()
            for name in ("pod-0", "pod-1"):
                pods.start(name)
            sim.come_to_rest()
            pods.lead()
            await asked(pods)
            await pods.turn()
            try:
                await story(pods)
            finally:
                await sim.kms.__aexit__(None, None, None)
            return pods

        return asyncio.run(run())

    return tell


async def asked(pods: KeyPods) -> None:
    """Wait until the service was asked everything that it is to be asked, or told why not."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            pods.sim.settle()
            running = [work.task for work in pods.sim.kms._work.values() if work.task and not work.task.done()]
            if not running or pods.sim.store.domain(NAMESPACE).keys_problem:
                pods.sim.settle()
                return
            await asyncio.sleep(0.01)


async def restart(pods: KeyPods) -> None:
    await pods.sim.kms.__aexit__(None, None, None)
    pods.sim.restart()
    pods.lead()
    await asked(pods)
    await pods.turn()


def at_hand(pods: KeyPods) -> tuple[str, str]:
    return pods.sim.condition("CacheDomain", "default", "KeysAtHand")


def epochs(pods: KeyPods) -> list[str]:
    return [pods.sim.status(TCP, name)["scope"]["epoch"] for name in ("acme", "globex")]


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


def test_an_operator_that_is_started_anew_has_them_unwrapped_although_no_pod_is_left(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before, held = epochs(pods), dict(pods.held["pod-0"])
        pods.end("pod-0")
        pods.end("pod-1")
        await restart(pods)
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
        async with asyncio.timeout(PATIENCE_S):
            while pods.sim.store.domain(NAMESPACE).keys_problem:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
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
        assert {*pods.held["pod-0"]} == pods.named() != set()

    told(story)


def test_a_record_that_cannot_be_opened_keeps_nobody_else_from_their_keys(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        assert acme[:1] != globex[:1]
        secret = secret_of(pods, acme)
        record = WrappedKey.decode(base64.b64decode(secret["data"][acme]))
        assert record is not None
        secret["data"][acme] = base64.b64encode(replace(record, service="another").encode()).decode()
        await restart(pods)
        async with asyncio.timeout(PATIENCE_S):
            while globex not in pods.sim.memory.custody(NAMESPACE).ids([globex]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert at_hand(pods) == ("False", "KeyCustodyAway")
        assert "another one answers" in pods.sim.store.domain(NAMESPACE).keys_problem

    told(story)


def test_a_key_that_nobody_needs_is_deleted_in_the_service(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        def wrapping() -> int:
            return sum((pods.sim.world.domain_id or "-") in name for name in bao.key_names())

        count = wrapping()
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await pods.turn()
        await asked(pods)
        await pods.turn(61)
        await pods.turn(61)
        await asked(pods)
        assert wrapping() == count
        assert {*pods.held["pod-0"]} == pods.named()

    told(story)


def test_a_service_that_the_operator_s_owner_did_not_allow_is_shown_no_token(
    bao: BaoServer, token_file: Path, told: Callable[..., KeyPods]
) -> None:
    token_file.unlink()  # a read of it would be told as NoToken

    async def story(pods: KeyPods) -> None:
        assert at_hand(pods) == ("False", "KeyCustodyAway")
        assert f"has not allowed {bao.address}" in pods.sim.store.domain(NAMESPACE).keys_problem
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
        assert revoked[acme].removed is not None
        await asked(pods)
        assert acme not in pods.sim.memory.custody(NAMESPACE).ids(epochs(pods))
        assert acme not in pods.sim.world.data_keys

    told(story)


def test_nobody_is_asked_for_a_namespace_without_its_domain(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        bao.seal()
        try:
            await restart(pods)
            work = pods.sim.kms._work[NAMESPACE]
            assert work.task is not None
            assert not work.task.done()
            pods.sim.delete("CacheDomain", "default")
            pods.sim.store.domain(NAMESPACE).objects["CacheDomain"].clear()
            await asyncio.wait_for(work.task, PATIENCE_S)
        finally:
            bao.unseal()

    told(story)


def wraps(pods: KeyPods, bao: BaoServer, epoch: str) -> bool:
    """Whether the service has what wraps the key of an epoch."""
    return wrapping_key(pods.sim.world.domain_id or "", epoch) in bao.admin("LIST", f"{MOUNT}/keys")["data"]["keys"]


def recorded(pods: KeyPods) -> dict[str, WrappedKey | None]:
    """By epoch, what Secrets have of its key."""
    return {
        epoch: WrappedKey.decode(base64.b64decode(value))
        for shard in SHARDS
        for epoch, value in secret_of(pods, shard).get("data", {}).items()
    }


def secret_of(pods: KeyPods, epoch: str, domain: str = "") -> dict[str, Any]:
    """The Secret that has what is stored of an epoch, empty if there is none; of the domain that is there, or was."""
    name = names.wrapped_keys_secret(domain or pods.sim.world.domain_id or "", epoch[:1])
    found: dict[str, Any] = pods.sim.kube.objects.get(("Secret", "kvstrata-system", name), {})
    return found


def spoil(pods: KeyPods, epoch: str) -> None:
    """Let the record of an epoch name a service that is not asked."""
    data = secret_of(pods, epoch)["data"]
    record = recorded(pods)[epoch]
    assert record is not None
    data[epoch] = base64.b64encode(replace(record, service="another").encode()).decode()


async def pass_by(pods: KeyPods, until: Callable[[], object]) -> None:
    """Let time pass, with whole lists of all objects, until `until` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not until():
            await pods.sim.resync.objects(lambda _: None)
            pods.sim.enqueue_all()
            await pods.turn(61)
            await asyncio.sleep(0.05)


def test_what_a_record_that_cannot_be_opened_is_for_ends_with_its_epoch_and_everything_else_goes_on(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        spoil(pods, acme)
        await restart(pods)
        pods.sim.edit(TCP, "globex", cacheGeneration=2)
        await pass_by(pods, lambda: globex not in recorded(pods) and epochs(pods)[1] in recorded(pods))
        assert not wraps(pods, bao, globex)
        assert wraps(pods, bao, epochs(pods)[1])
        assert epochs(pods)[1] in pods.sim.world.data_keys
        assert at_hand(pods) == ("False", "KeyCustodyAway")
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await pass_by(pods, lambda: at_hand(pods) == ("True", "KeysAtHand"))
        await asked(pods)
        assert pods.sim.kms._work[NAMESPACE].left is False
        assert {*pods.held["pod-0"]} == pods.named() != set()

    told(story)


@pytest.mark.parametrize("revoked", [False, True])
def test_what_was_to_end_when_the_operator_died_ends_when_another_leads(
    revoked: bool, told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        acme = epochs(pods)[0]
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await asked(pods)  # and no pod has acknowledged it
        if revoked:
            await pods.sim.kms.revoke(NAMESPACE, pods.sim.world.domain_id or "", [acme])
        assert wraps(pods, bao, acme)
        await restart(pods)
        await pass_by(pods, lambda: not wraps(pods, bao, acme))
        await asked(pods)
        left = recorded(pods)
        kept = {epoch for epoch, record in left.items() if record is not None and record.wrapped}
        assert kept == epochs_in_use(pods.sim.world)
        assert (acme in left) == revoked, "somebody may ask for what a former operator revoked"
        assert {*pods.held["pod-0"]} == pods.named() != set()

    told(story)


def test_an_end_that_the_service_does_not_confirm_is_asked_for_again_or_counted(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(reason: str) -> float:
        return metrics.KEYS_NOT_ENDED.labels(reason)._value.get()

    async def keep(_: TransitClient, name: str) -> None:
        """Delete nothing, as a service does that lost the request."""

    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        before = (counted("StillThere"), counted("AnotherKms"))
        with monkeypatch.context() as patched:
            patched.setattr(TransitClient, "delete", keep)
            pods.sim.edit(TCP, "acme", cacheGeneration=2)
            await pass_by(pods, lambda: counted("StillThere") > before[0])
            assert wraps(pods, bao, acme)
            assert acme in recorded(pods)
        await pass_by(pods, lambda: acme not in recorded(pods))
        assert not wraps(pods, bao, acme)
        spoil(pods, globex)
        pods.sim.edit(TCP, "globex", cacheGeneration=2)
        await pass_by(pods, lambda: counted("AnotherKms") > before[1])
        await asked(pods)
        assert pods.sim.kms._work[NAMESPACE].left is False
        assert globex in recorded(pods), "it is the only note of what another service has"

    told(story)


def test_of_a_domain_that_is_gone_keys_are_revoked_where_it_is_noted_that_they_are(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, domain = epochs(pods)[0], pods.sim.world.domain_id or ""
        domains = pods.sim.store.domain(NAMESPACE).objects["CacheDomain"]
        found = domains.pop("default")
        unreadable = pods.sim.store.domain(NAMESPACE).unreadable
        unreadable[Key("CacheDomain", NAMESPACE, "default")] = Unreadable("not now", 1, "1", told=True)
        for ask in (pods.sim.kms.revoke, pods.sim.kms.destroy):
            with pytest.raises(CustodyError, match="cannot be read"):
                await ask(NAMESPACE, domain, [acme])
        unreadable.clear()
        before = secret_of(pods, acme, domain)["data"][acme]
        assert (await pods.sim.kms.revoke(NAMESPACE, domain, [acme]))[acme].removed is not None
        noted = [
            WrappedKey.decode(base64.b64decode(raw)) for raw in (before, secret_of(pods, acme, domain)["data"][acme])
        ]
        assert [bool(record and record.wrapped) for record in noted] == [True, False]
        assert (await pods.sim.kms.destroy(NAMESPACE, domain, [acme]))[acme].confirmed is not None
        # Of a domain that is noted nowhere nobody has a key, and nobody can say that a service has none.
        assert (await pods.sim.kms.revoke(NAMESPACE, "elsewhere", [acme]))[acme].removed is not None
        assert (await pods.sim.kms.destroy(NAMESPACE, "elsewhere", [acme]))[acme].confirmed is None
        domains["default"] = found

    told(story)


def test_keys_of_a_domain_that_could_not_be_read_at_the_start_are_not_given_up(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before, held = epochs(pods), dict(pods.held["pod-0"])
        for name in ("pod-0", "pod-1"):
            pods.end(name)
        readable = pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]
        pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"] = {**readable, "spec": {"keyCustody": "Nowhere"}}
        await pods.sim.kms.__aexit__(None, None, None)
        pods.sim.restart()
        pods.lead()
        assert pods.sim.world.domain is None
        await asked(pods)
        await pods.turn()
        pods.sim.put({**readable, "metadata": {**readable["metadata"], "labels": {"read": "again"}}})
        assert pods.sim.world.domain is not None
        await pass_by(pods, lambda: {*pods.sim.memory.custody(NAMESPACE).ids(before)} == {*before})
        await asked(pods)
        await pods.turn()
        assert at_hand(pods) == ("True", "KeysAtHand")
        assert epochs(pods) == before
        pods.start("pod-2")
        await pods.turn()
        assert pods.held["pod-2"] == held

    told(story)


def test_a_domain_that_has_another_custody_now_is_asked_for_no_service(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        bao.seal()
        try:
            await restart(pods)
            assert at_hand(pods) == ("False", "KeyCustodyAway")
            raw = pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]
            pods.sim.put({**raw, "status": {**raw["status"], "keyCustody": "Memory"}})
            pods.sim.settle()
            assert at_hand(pods)[1] != "KeyCustodyAway"
            work = pods.sim.kms._work[NAMESPACE]
            assert work.task is not None
            work.woken.set()
            await asyncio.wait_for(work.task, PATIENCE_S)
            assert work.left is False
            assert pods.sim.store.domain(NAMESPACE).keys_problem == ""
        finally:
            bao.unseal()

    told(story)

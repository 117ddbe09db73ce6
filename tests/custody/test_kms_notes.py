"""What is noted of where keys of a real OpenBao are: it comes back when it is deleted, follows no wrong way, and stays
as long as somebody may ask for it."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.transit import TransitClient
from kvstrata.model.erasure.record import ErasureRecord
from kvstrata.model.pods import Unreadable
from kvstrata.model.refs import Key
from kvstrata.objects import labels, names
from kvstrata.reconcile.erasure.record_store import COMPONENT
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.wrapped_keys import wrapping_key
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.kms_stories import (
    OPERATORS,
    TCP,
    Story,
    asked,
    at_hand,
    domain_of,
    epochs,
    forget_policies,
    happens,
    left,
    noted,
    pass_by,
    recorded,
    secret_of,
    spoil,
    waiting,
    wrapping,
)
from tests.custody.kms_stories import objects as objects
from tests.custody.kms_stories import told as told
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE, invalidation


def lose_note(pods: KeyPods) -> None:
    """Delete what is noted, as somebody does who tidies up."""
    pods.sim.kube.remove("Secret", OPERATORS, names.kms_domain(domain_of(pods)))


def authority(pods: KeyPods) -> dict[str, str]:
    """The certificate authority that the CacheDomain names, to be changed."""
    found: dict[str, str] = pods.sim.kube.objects["ConfigMap", NAMESPACE, "kms-authority"]["data"]
    return found


async def settle_without_domain(pods: KeyPods, *, policies: bool = True) -> str:
    """Delete the CacheDomain, and have its keys ended; return its id. Its notes stay if there are policies."""
    domain = domain_of(pods)
    pods.sim.delete("CacheDomain", "default")
    if not policies:
        forget_policies(pods)
    await pods.sim.kms_domains.settle()
    return domain


def test_a_note_that_is_deleted_while_a_key_is_drawn_is_missed_and_written_anew(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        before, real = {*bao.key_names()}, TransitClient.draw

        async def draw(client: TransitClient, name: str) -> Any:
            lose_note(pods)
            return await real(client, name)

        with monkeypatch.context() as patched:
            patched.setattr(TransitClient, "draw", draw)
            pods.sim.edit(TCP, "acme", cacheGeneration=1)
            await pods.turn()
            await asked(pods)
            # Another attempt may be at work already, which ends in the same way.
            await happens(lambda: {*bao.key_names()} <= before)
        name = names.kms_domain(domain_of(pods))
        assert f"{name} is missing" in pods.sim.store.domain(NAMESPACE).keys_problem
        await pass_by(pods, lambda: epochs(pods)[0] in recorded(pods) and at_hand(pods) == ("True", "KeysAtHand"))
        assert (await noted(pods)).domain == domain_of(pods)

    told(story)


def test_a_note_that_is_deleted_is_written_anew_before_the_next_key_is_drawn(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before = await noted(pods)
        lose_note(pods)
        pods.sim.edit(TCP, "acme", cacheGeneration=1)
        await pods.turn()
        await asked(pods)
        assert await noted(pods) == before
        assert epochs(pods)[0] in recorded(pods)

    told(story)


def test_a_note_that_is_deleted_is_written_anew_though_no_key_is_drawn(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        before = await noted(pods)
        lose_note(pods)
        await pods.sim.kms_domains.settle()
        assert await noted(pods) == before

    told(story)


def test_a_list_without_a_domain_that_the_watch_still_has_ends_nothing(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        count, real = wrapping(bao, domain_of(pods)), pods.sim.kube.list

        async def listed(resource: Any, *where: Any) -> AsyncIterator[Any]:
            if resource.kind != "CacheDomain":
                async for raw in real(resource, *where):
                    yield raw

        monkeypatch.setattr(pods.sim.kube, "list", listed)
        await pods.sim.kms_domains.settle()
        assert (wrapping(bao, domain_of(pods)), waiting()) == (count, 1)
        assert not (await noted(pods)).ending

    told(story)


def test_a_domain_that_is_restored_with_its_id_while_its_keys_end_goes_on(
    told: Callable[[Story], KeyPods], bao: BaoServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(pods: KeyPods) -> None:
        raw = pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]
        await settle_without_domain(pods)
        assert (await noted(pods)).ending
        metadata = {"name": "default", "namespace": NAMESPACE}
        pods.sim.put({**{key: raw[key] for key in ("apiVersion", "kind", "spec", "status")}, "metadata": metadata})
        await pods.sim.kms_domains.settle()
        found = await noted(pods)
        assert (found.ending, found.uid) == (
            False,
            pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]["metadata"]["uid"],
        )
        assert "a CacheDomain is there again" in caplog.text
        pods.sim.edit(TCP, "acme", cacheGeneration=1)
        await pass_by(pods, lambda: wrapping(bao, domain_of(pods)) and at_hand(pods) == ("True", "KeysAtHand"))

    told(story)


def test_a_note_is_not_replaced_by_a_way_that_the_service_does_not_let_the_operator_go(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    """Who asks whether it is there gets an answer, whatever the mount, the role and the policy."""

    async def story(pods: KeyPods) -> None:
        before, kms = await noted(pods), pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]["spec"]["kms"]
        for epoch in recorded(pods):
            secret_of(pods, epoch)["data"].clear()  # no record says that it is not the way
        pods.sim.edit("CacheDomain", "default", kms={**kms, "mount": "elsewhere"})
        await pods.sim.kms_domains.settle()
        assert await noted(pods) == before
        pods.sim.edit("CacheDomain", "default", kms={**kms, "mount": MOUNT, "role": "another"})
        await pods.sim.kms_domains.settle()
        assert (await noted(pods)).kms.role == "another"

    told(story)


def test_a_note_is_not_replaced_by_the_way_to_another_service_than_wrapped_what_there_is(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before, acme = await noted(pods), epochs(pods)[0]
        own = secret_of(pods, acme)["data"][acme]
        spoil(pods, acme)
        authority(pods)["ca.crt"] += "\n"
        await pods.sim.kms_domains.settle()
        assert await noted(pods) == before
        with pytest.raises(CustodyError, match=r"another one answers; spec\.kms is to be as it was"):
            await pods.sim.kms_domains.of_namespace(NAMESPACE)
        secret_of(pods, acme)["data"][acme] = own
        await pods.sim.kms_domains.settle()
        assert await noted(pods) == replace(before, authority=before.authority + b"\n")

    told(story)


def test_keys_of_which_nothing_says_where_the_rest_is_are_counted_and_not_called_revoked(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        domain, acme = domain_of(pods), epochs(pods)[0]
        lose_note(pods)
        pods.sim.delete("CacheDomain", "default")
        pods.sim.kms_domains._looks = 0
        for _ in range(2):
            await pods.sim.kms_domains.settle()
            assert waiting() == 1
        for secret in left(pods, domain):
            data = pods.sim.kube.objects["Secret", OPERATORS, secret]["data"]
            data.update({epoch: base64.b64encode(b"of another version").decode() for epoch in data})
        with pytest.raises(CustodyError, match="no record names the service"):
            await pods.sim.kms.revoke(NAMESPACE, domain, [acme])
        for secret in left(pods, domain):
            pods.sim.kube.remove("Secret", OPERATORS, secret)
        pods.sim.kms_domains._looks = 0
        await pods.sim.kms_domains.settle()
        assert waiting() == 0

    told(story)


def test_keys_end_though_nobody_can_list_which_have_no_note(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        real = pods.sim.kube.list

        def listed(resource: Any, namespace: str, selector: str = "") -> Any:
            if "wrapped-keys," in f"{selector},":
                raise KubeError(504, "Timeout", "too many")
            return real(resource, namespace, selector)

        monkeypatch.setattr(pods.sim.kube, "list", listed)
        assert wrapping(bao, await settle_without_domain(pods)) == 0

    told(story)


def test_what_this_version_cannot_read_is_not_called_revoked(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        acme = epochs(pods)[0]
        secret_of(pods, acme)["data"][acme] = base64.b64encode(b"of another version").decode()
        with pytest.raises(CustodyError, match="1 data keys are in Secrets still"):
            await pods.sim.kms.revoke(NAMESPACE, domain_of(pods), [acme])
        del secret_of(pods, acme)["data"][acme]
        assert (await pods.sim.kms.revoke(NAMESPACE, domain_of(pods), [acme]))[acme] is not None

    told(story)


def test_a_note_goes_when_nothing_was_found_twice_in_a_row(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        custody = await pods.sim.kms_domains.of_namespace(NAMESPACE)
        domain = await settle_without_domain(pods, policies=False)
        await pods.sim.kms_domains.settle()

        async def late() -> str:
            return ""

        monkeypatch.setattr(custody, "_why_not", late)
        await custody.draw(["a" * 32])
        await pods.sim.kms_domains.settle()
        assert wrapping(bao, domain) == 0
        await pods.sim.kms_domains.settle()
        with monkeypatch.context() as patched:
            patched.setattr(pods.sim.kms_domains._services, "client", None)
            await pods.sim.kms_domains.settle()
        await pods.sim.kms_domains.settle()
        assert left(pods, domain) == [names.kms_domain(domain)], "a look that failed is between the two"
        await pods.sim.kms_domains.settle()
        assert left(pods, domain) == []

    told(story)


def test_a_note_of_which_somebody_will_ask_stays_and_the_key_s_end_can_be_asked_for(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        domain = await settle_without_domain(pods)
        assert wrapping(bao, domain) == 0
        held = [*secret_of(pods, acme, domain)["data"], *secret_of(pods, globex, domain)["data"]]
        assert {*held} == {acme, globex}
        assert (await pods.sim.kms.revoke(NAMESPACE, domain, [acme]))[acme] is not None
        assert (await pods.sim.kms.destroy(NAMESPACE, domain, [acme]))[acme].confirmed is not None
        forget_policies(pods)
        secret_of(pods, globex, domain)["data"]["c" * 32] = base64.b64encode(b"of another version").decode()
        for _ in range(3):
            await pods.sim.kms_domains.settle()
        name = names.wrapped_keys_secret(domain, globex[:1])
        assert name in left(pods, domain)
        assert waiting() == 1, "whoever wrote it may know a key"
        secret_of(pods, globex, domain)["data"].clear()
        for _ in range(2):
            await pods.sim.kms_domains.settle()
        assert (left(pods, domain), waiting()) == ([], 0)

    told(story)


def test_what_nobody_can_read_is_counted_beside_notes(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        secret_of(pods, globex)["data"]["c" * 32] = base64.b64encode(b"of another version").decode()
        domain = await settle_without_domain(pods)
        assert waiting() == 1
        assert acme in secret_of(pods, acme, domain)["data"]
        del secret_of(pods, globex, domain)["data"]["c" * 32]
        await pods.sim.kms_domains.settle()
        assert waiting() == 0

    told(story)


def test_a_key_that_is_drawn_anew_after_its_end_ends_again_and_no_other_is_asked_about(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        custody = await pods.sim.kms_domains.of_namespace(NAMESPACE)
        domain, looked, real = await settle_without_domain(pods), list[str](), TransitClient.call

        async def late() -> str:
            return ""

        async def call(client: TransitClient, method: str, path: str, *rest: Any, **options: Any) -> Any:
            looked.append(path)
            return await real(client, method, path, *rest, **options)

        monkeypatch.setattr(custody, "_why_not", late)
        await custody.forget([globex])
        await custody.draw([globex])
        assert wrapping(bao, domain) == 1
        monkeypatch.setattr(TransitClient, "call", call)
        await pods.sim.kms_domains.settle()
        assert wrapping(bao, domain) == 0
        assert any(wrapping_key(domain, globex) in path for path in looked)
        assert not any(wrapping_key(domain, acme) in path for path in looked)

    told(story)


def test_a_note_stays_for_an_invalidation_that_is_not_over(told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        acme = epochs(pods)[0]
        pods.sim.put(invalidation("leave", scope={"tenant": "acme"}))
        await asked(pods)
        assert acme != epochs(pods)[0]
        assert acme in recorded(pods)
        domain = await settle_without_domain(pods, policies=False)
        assert {epoch for epoch in secret_of(pods, acme, domain)["data"] if epoch == acme} == {acme}

    told(story)


@pytest.mark.parametrize("what", ["record", "holder"])
def test_every_note_stays_while_nobody_can_read_who_asks(what: str, told: Callable[[Story], KeyPods]) -> None:
    async def story(pods: KeyPods) -> None:
        acme, key = epochs(pods)[0], Key(TCP, NAMESPACE, "hooli")
        unreadable = pods.sim.store.domain(NAMESPACE).unreadable
        if what == "holder":
            unreadable[key] = Unreadable("not now", 1, "1", reported=True)
        else:
            metadata = {"name": "record", "namespace": OPERATORS, "labels": labels.of_receipts(COMPONENT)}
            pods.sim.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})
        domain = await settle_without_domain(pods, policies=False)
        assert acme in secret_of(pods, acme, domain)["data"]
        unreadable.clear()
        if what == "record":
            pods.sim.kube.remove("Secret", OPERATORS, "record")
        for _ in range(3):
            await pods.sim.kms_domains.settle()
        assert left(pods, domain) == []

    told(story)


def test_a_note_stays_that_a_status_named_when_records_of_erasures_began_to_be_listed(
    told: Callable[[Story], KeyPods], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, real = epochs(pods)[0], pods.sim.kms_domains._record_store.records

        async def records(**options: Any) -> AsyncIterator[ErasureRecord]:
            async for record in real(**options):
                yield record
            pods.sim.store.domain(NAMESPACE).policies.clear()

        monkeypatch.setattr(pods.sim.kms_domains._record_store, "records", records)
        domain = await settle_without_domain(pods)
        assert acme in secret_of(pods, acme, domain)["data"]

    told(story)


def test_notes_that_stay_cost_sixteen_reads_and_the_service_nothing(
    told: Callable[[Story], KeyPods], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        await settle_without_domain(pods)
        reads, requests, real = [], [], pods.sim.kube.get

        async def get(resource: Any, namespace: str, name: str) -> Any:
            reads.append(name)
            return await real(resource, namespace, name)

        async def call(client: TransitClient, method: str, path: str, *rest: Any, **options: Any) -> Any:
            requests.append(path)
            raise AssertionError

        monkeypatch.setattr(pods.sim.kube, "get", get)
        monkeypatch.setattr(TransitClient, "call", call)
        await pods.sim.kms_domains.settle()
        assert (len(reads), requests, waiting()) == (16, [], 0)

    told(story)


def test_the_id_of_another_namespace_s_domain_is_of_no_use_to_the_one_that_claims_it(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        raw = pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]
        pods.sim.store.observe({**raw, "metadata": {**raw["metadata"], "namespace": "elsewhere", "uid": "other"}})
        assert pods.sim.store.world("elsewhere").domain_id == domain_of(pods)
        with pytest.raises(CustodyError, match="never in this namespace"):
            await pods.sim.kms_domains.of_domain("elsewhere", domain_of(pods))

    told(story)


def test_a_note_that_does_not_say_whether_keys_end_is_read_as_one_whose_keys_do_not(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        before = await noted(pods)
        data = pods.sim.kube.objects["Secret", OPERATORS, names.kms_domain(domain_of(pods))]["data"]
        raw = json.loads(base64.b64decode(data["domain.json"]))
        del raw["ending"]
        data["domain.json"] = base64.b64encode(json.dumps(raw).encode()).decode()
        assert await noted(pods) == before

    told(story)

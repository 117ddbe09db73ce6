"""What a domain leaves in a real OpenBao when it is deleted: nothing, whoever leads, and not before it is certain."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.contract.policy.data_key import key_id
from kvstrata.objects import names
from kvstrata.reconcile import metrics
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.kms_custody import KmsCustody
from kvstrata.reconcile.keys.kms_domains_store import KmsDomainStore
from tests.custody.bao_server import BaoServer
from tests.custody.kms_stories import (
    OPERATORS,
    TCP,
    Story,
    asked,
    at_hand,
    complete,
    domain_of,
    epochs,
    forget_policies,
    left,
    pass_by,
    restart,
    waiting,
    wrapping,
)
from tests.custody.kms_stories import objects as objects
from tests.custody.kms_stories import told as told
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE


@pytest.mark.parametrize("anew", [False, True])
def test_keys_of_a_deleted_domain_are_deleted_in_the_service(
    told: Callable[[Story], KeyPods], bao: BaoServer, anew: bool
) -> None:
    async def story(pods: KeyPods) -> None:
        domain = domain_of(pods)
        assert wrapping(bao, domain) >= 2
        await pods.sim.kms_domains.settle()
        assert wrapping(bao, domain) >= 2, "it is there"
        pods.sim.delete("CacheDomain", "default")
        pods.sim.delete("ConfigMap", "kms-authority")
        if anew:
            await pods.sim.kms.__aexit__(None, None, None)
            pods.sim.restart()
        await pods.sim.kms_domains.settle()
        assert (wrapping(bao, domain), waiting()) == (0, 0)
        assert left(pods, domain), "policies name the epochs, so somebody may still ask what became of their keys"
        forget_policies(pods)
        for _ in range(3):
            await pods.sim.kms_domains.settle()
        assert (left(pods, domain), waiting()) == ([], 0)

    told(story)


def test_where_another_domain_follows_it_epochs_are_replaced_whose_keys_go(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        domain, before, held = domain_of(pods), epochs(pods), {*pods.held["pod-0"]}
        raw = pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]
        again = {key: raw[key] for key in ("apiVersion", "kind", "spec")}
        pods.sim.delete("CacheDomain", "default")
        pods.sim.put({**again, "metadata": {"name": "default", "namespace": NAMESPACE}})
        await asked(pods)
        await pods.turn()
        new = domain_of(pods)
        assert new != domain
        await pods.sim.kms_domains.settle()
        for _ in range(3):
            await pods.turn()
            await asked(pods)
        await pass_by(pods, lambda: (wrapping(bao, domain), wrapping(bao, new)) == (0, 3))
        assert not {*before} & {*epochs(pods)}
        await pass_by(pods, lambda: complete(pods))
        assert not held & pods.named()
        await restart(pods)
        assert at_hand(pods) == ("True", "KeysAtHand")

    told(story)


def test_while_it_is_not_certain_that_a_domain_is_gone_nothing_is_deleted(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        domain, count = domain_of(pods), wrapping(bao, domain_of(pods))
        real, told_of = pods.sim.kube.list, {"status": 500}

        def listed(resource: Any, *where: Any) -> Any:
            if resource.kind == "CacheDomain":
                raise KubeError(told_of["status"], "Refused", "not now")
            return real(resource, *where)

        monkeypatch.setattr(pods.sim.kube, "list", listed)
        for status in (500, 404):  # 404: the kind is not served, or something else answers than the API server
            told_of["status"] = status
            await pods.sim.kms_domains.settle()
            assert (wrapping(bao, domain), waiting()) == (count, 1)
        told_of["status"] = 403
        ending = False

        async def is_ending(namespace: str) -> bool:
            return ending

        monkeypatch.setattr(pods.sim.kube, "is_ending", is_ending)
        metrics.KMS_DOMAINS_OPEN.set(0)
        await pods.sim.kms_domains.settle()
        assert (wrapping(bao, domain), waiting()) == (count, 1), "not allowed, and not because the namespace ends"
        ending = True
        await pods.sim.kms_domains.settle()
        assert wrapping(bao, domain) == 0, "with a namespace goes the right to read in it"

    told(story)


def test_a_service_that_is_away_is_asked_again_and_counted(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        domain, count = domain_of(pods), wrapping(bao, domain_of(pods))
        pods.sim.delete("CacheDomain", "default")
        bao.seal()
        try:
            await pods.sim.kms_domains.settle()
            assert waiting() == 1
        finally:
            bao.unseal()
        assert wrapping(bao, domain) == count
        await pods.sim.kms_domains.settle()
        assert (wrapping(bao, domain), waiting()) == (0, 0)

    told(story)


def test_an_operator_that_does_not_lead_deletes_nothing(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        domain, count = domain_of(pods), wrapping(bao, domain_of(pods))
        pods.sim.delete("CacheDomain", "default")
        pods.sim.kms_domains._leading = lambda: False
        await pods.sim.kms_domains.settle()
        assert wrapping(bao, domain) == count

    told(story)


def test_it_is_noted_where_keys_are_before_the_first_is_made(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        before = {*bao.key_names()}
        for name in left(pods, domain_of(pods)):
            pods.sim.kube.remove("Secret", OPERATORS, name)

        def refuse(verb: str, kind: str, name: str) -> None:
            if name.startswith("kvstrata-kms-"):
                raise KubeError(500, "InternalError", "not now")

        pods.sim.kube.before_write = refuse
        pods.sim.edit(TCP, "acme", cacheGeneration=1)
        await pods.turn()
        await asked(pods)
        assert pods.sim.store.domain(NAMESPACE).keys_problem
        assert {*bao.key_names()} == before
        pods.sim.kube.before_write = lambda *_: None

    told(story)


def test_a_domain_that_claims_another_namespace_s_id_gets_nothing_by_it(told: Callable[[Story], KeyPods]) -> None:
    """With the first to be deleted the other one's keys would end."""

    async def story(pods: KeyPods) -> None:
        kms_domains = pods.sim.kms_domains._stored
        (kms_domain,) = (await kms_domains.all())[0]
        for kind, name in (("CacheDomain", "default"), ("ConfigMap", "kms-authority")):
            raw = pods.sim.kube.objects[kind, NAMESPACE, name]
            claimed = {**raw, "metadata": {**raw["metadata"], "namespace": "elsewhere", "uid": "other"}}
            pods.sim.kube.put(claimed)
            if kind == "CacheDomain":
                pods.sim.store.observe(claimed)
        with pytest.raises(CustodyError, match="another namespace's domain"):
            await pods.sim.kms_domains.of_namespace("elsewhere")
        with pytest.raises(CustodyError, match="never in this namespace"):
            await pods.sim.kms_domains.of_domain("elsewhere", kms_domain.domain)
        assert (await kms_domains.all())[0] == (kms_domain,)

    told(story)


def test_a_domain_that_was_restored_with_its_id_is_there(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        domain, count = domain_of(pods), wrapping(bao, domain_of(pods))
        (kms_domain,) = (await pods.sim.kms_domains._stored.all())[0]
        await KmsDomainStore(pods.sim.kube, OPERATORS).write(replace(kms_domain, uid="of the one before"))
        await pods.sim.kms_domains.settle()
        assert wrapping(bao, domain) == count
        assert (await pods.sim.kms_domains._stored.all())[0] == (kms_domain,), "noted anew"

    told(story)


def test_what_is_noted_follows_the_way_to_the_service_if_it_leads_there(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    """A quiet domain asks its service for nothing; when it is deleted its ConfigMap may be gone."""

    async def story(pods: KeyPods) -> None:
        (kms_domain,) = (await pods.sim.kms_domains._stored.all())[0]
        authority = pods.sim.kube.objects["ConfigMap", NAMESPACE, "kms-authority"]
        good = authority["data"]["ca.crt"]
        for written, noted in ((f"{good}\n", f"{good}\n"), ("no certificate", f"{good}\n")):
            authority["data"]["ca.crt"] = written
            await pods.sim.kms_domains.settle()
            (now,) = (await pods.sim.kms_domains._stored.all())[0]
            assert now == replace(kms_domain, authority=noted.encode())

    told(story)


def test_a_note_that_nobody_can_read_is_counted_and_no_key_is_called_revoked_without_it(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        domain, count, acme = domain_of(pods), wrapping(bao, domain_of(pods)), epochs(pods)[0]
        secret = pods.sim.kube.objects["Secret", OPERATORS, names.kms_domain(domain)]
        secret["data"]["domain.json"] = base64.b64encode(b"{}").decode()
        pods.sim.delete("CacheDomain", "default")
        await pods.sim.kms_domains.settle()
        assert (wrapping(bao, domain), waiting()) == (count, 1)
        with pytest.raises(CustodyError, match="no content that this version can read"):
            await pods.sim.kms.revoke(NAMESPACE, domain, [acme])
        pods.sim.kube.remove("Secret", OPERATORS, names.kms_domain(domain))
        with pytest.raises(CustodyError, match="no record names the service"):
            await pods.sim.kms.revoke(NAMESPACE, domain, [acme])

    told(story)


def test_what_is_drawn_while_the_domain_goes_ends_with_it(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        domain, fresh = domain_of(pods), ["a" * 32, "b" * 32]
        custody = await pods.sim.kms_domains.of_namespace(NAMESPACE)
        real = custody._client.draw

        async def late(name: str) -> Any:
            """When the answer is used everything that was there has ended."""
            drawn = await real(name)
            if pods.sim.world.domain is not None:
                pods.sim.delete("CacheDomain", "default")
                for policy in ("acme", "globex"):
                    pods.sim.store.domain(NAMESPACE).policies.pop(policy)
                await pods.sim.kms_domains.settle()
            return drawn

        monkeypatch.setattr(custody._client, "draw", late)
        with pytest.raises(CustodyError, match="are being ended"):
            await custody.draw(fresh)
        assert wrapping(bao, domain) == 0
        for _ in range(2):
            await pods.sim.kms_domains.settle()
        assert (left(pods, domain), wrapping(bao, domain)) == ([], 0)

    told(story)


def test_what_was_asked_for_a_domain_is_not_held_for_the_one_that_follows_it(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pods: KeyPods) -> None:
        domain, real = domain_of(pods), KmsCustody.open
        raw = pods.sim.kube.objects["CacheDomain", NAMESPACE, "default"]
        again = {key: raw[key] for key in ("apiVersion", "kind", "spec")}
        former: dict[str, str] = {}

        async def open_late(custody: KmsCustody, wanted: Any) -> Any:
            opened = await real(custody, wanted)
            if custody.domain == domain and pods.sim.world.domain_id == domain:
                former.update({epoch: key_id(key) for epoch, key in opened.found.items() if key})
                pods.sim.delete("CacheDomain", "default")
                pods.sim.put({**again, "metadata": {"name": "default", "namespace": NAMESPACE}})
            return opened

        monkeypatch.setattr(KmsCustody, "open", open_late)
        pods.sim.edit(TCP, "acme", cacheGeneration=1)
        await pods.turn()
        await asked(pods)
        for _ in range(3):
            await pods.turn()
            await asked(pods)
            known = pods.sim.store.domain(NAMESPACE).data_keys
            assert former
            assert not former.items() & known.items()
        assert at_hand(pods) == ("True", "KeysAtHand")

    told(story)


def test_a_run_settles_by_itself(told: Callable[[Story], KeyPods], bao: BaoServer) -> None:
    async def story(pods: KeyPods) -> None:
        domain = domain_of(pods)
        pods.sim.delete("CacheDomain", "default")
        async with pods.sim.kms, asyncio.timeout(60):
            while wrapping(bao, domain):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    told(story)

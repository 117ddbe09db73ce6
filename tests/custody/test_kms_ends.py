"""Keys that a real OpenBao wraps, and their ends: nobody needs them, an operator died, their domain is gone."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import pytest

from kvstrata.clients.transit import TransitClient
from kvstrata.model.pods import Unreadable
from kvstrata.model.refs import Key
from kvstrata.plan.keys.data_keys import epochs_in_use
from kvstrata.reconcile import metrics
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.kms_custody import KmsCustody
from kvstrata.reconcile.keys.wrapped_keys import WrappedKey
from tests.custody.bao_server import BaoServer
from tests.custody.kms_stories import (
    PATIENCE_S,
    TCP,
    Story,
    asked,
    at_hand,
    busy,
    complete,
    epochs,
    pass_by,
    recorded,
    restart,
    secret_of,
    spoil,
    wraps,
)
from tests.custody.kms_stories import objects as objects
from tests.custody.kms_stories import told as told
from tests.support.key_pods import KeyPods
from tests.support.objects import NAMESPACE


def test_what_a_record_that_cannot_be_opened_is_for_ends_with_its_epoch_and_everything_else_goes_on(
    told: Callable[[Story], KeyPods], bao: BaoServer
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, globex = epochs(pods)
        spoil(pods, acme)
        await restart(pods)
        pods.sim.edit(TCP, "globex", cacheGeneration=2)

        def replaced() -> bool:
            new = epochs(pods)[1]
            return globex not in recorded(pods) and new in recorded(pods) and new in pods.sim.world.data_keys

        await pass_by(pods, replaced)
        assert not wraps(pods, bao, globex)
        assert wraps(pods, bao, epochs(pods)[1])
        assert at_hand(pods) == ("False", "KeyCustodyAway")
        pods.sim.edit(TCP, "acme", cacheGeneration=2)
        await pass_by(pods, lambda: at_hand(pods) == ("True", "KeysAtHand"))
        await asked(pods)
        assert not busy(pods)
        await pass_by(pods, lambda: complete(pods))

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
        await pass_by(pods, lambda: complete(pods))

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
        assert not busy(pods)
        assert globex in recorded(pods), "it is the only note of what another service has"

    told(story)


def test_of_a_domain_that_is_gone_keys_are_revoked_where_it_is_noted_that_they_are(
    told: Callable[[Story], KeyPods],
) -> None:
    async def story(pods: KeyPods) -> None:
        acme, domain = epochs(pods)[0], pods.sim.world.domain_id or ""
        domains = pods.sim.store.domain(NAMESPACE).domains
        found = domains.pop("default")
        unreadable = pods.sim.store.domain(NAMESPACE).unreadable
        unreadable[Key("CacheDomain", NAMESPACE, "default")] = Unreadable("not now", 1, "1", reported=True)
        for ask in (pods.sim.kms.revoke, pods.sim.kms.destroy):
            with pytest.raises(CustodyError, match="cannot be read"):
                await ask(NAMESPACE, domain, [acme])
        unreadable.clear()
        before = secret_of(pods, acme, domain)["data"][acme]
        assert (await pods.sim.kms.revoke(NAMESPACE, domain, [acme]))[acme] is not None
        noted = [
            WrappedKey.decode(base64.b64decode(raw)) for raw in (before, secret_of(pods, acme, domain)["data"][acme])
        ]
        assert [bool(record and record.wrapped) for record in noted] == [True, False]
        assert (await pods.sim.kms.destroy(NAMESPACE, domain, [acme]))[acme].confirmed is not None
        # Of a domain that is noted nowhere nobody has a key, and nobody can say that a service has none.
        assert (await pods.sim.kms.revoke(NAMESPACE, "elsewhere", [acme]))[acme] is not None
        assert (await pods.sim.kms.destroy(NAMESPACE, "elsewhere", [acme]))[acme].confirmed is None
        domains["default"] = found

    told(story)


def test_for_a_domain_that_goes_while_its_service_is_looked_for_no_key_is_drawn_and_none_is_ended(
    told: Callable[[Story], KeyPods], bao: BaoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What of it has to end ends with all of it."""

    async def story(pods: KeyPods) -> None:
        (acme, globex), count, real = epochs(pods), len(bao.key_names()), pods.sim.kms_domains.of_namespace
        made: list[str] = []

        async def of_namespace(namespace: str) -> KmsCustody:
            custody = await real(namespace)
            pods.sim.store.domain(NAMESPACE).domains.clear()
            return custody

        async def make(client: TransitClient, name: str) -> bool:
            made.append(name)
            raise AssertionError

        monkeypatch.setattr(TransitClient, "make", make)
        monkeypatch.setattr(pods.sim.kms_domains, "of_namespace", of_namespace)
        work = pods.sim.kms._namespaces[NAMESPACE]
        pods.sim.ring.remove(NAMESPACE, [globex])
        pods.sim.store.domain(NAMESPACE).data_keys = {}
        secret_of(pods, globex)["data"].clear()
        work.wanted, work.spent = frozenset({globex}), frozenset({acme})
        await work.turn()
        assert (made, len(bao.key_names())) == ([], count)

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
        await pass_by(pods, lambda: {*pods.sim.ring.ids(NAMESPACE, before)} == {*before})
        await pass_by(pods, lambda: at_hand(pods) == ("True", "KeysAtHand"))
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
            pods.sim.put({**raw, "status": {**raw["status"], "keyCustody": "Secret"}})
            pods.sim.settle()
            assert at_hand(pods)[1] != "KeyCustodyAway"
            work = pods.sim.kms._namespaces[NAMESPACE]
            assert work.task is not None
            work.woken.set()
            await asyncio.wait_for(work.task, PATIENCE_S)
            assert not busy(pods)
            assert pods.sim.store.domain(NAMESPACE).keys_problem == ""
        finally:
            bao.unseal()

    told(story)

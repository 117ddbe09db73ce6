"""Receipts go into one chain whoever writes at once, dies, or lost the key: over an API server in memory."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata.api.cachedomain import ReceiptChain
from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.clients.signing import SigningKeys, is_signed
from kvstrata.contract.receipt.chain import check_chain
from kvstrata.contract.receipt.facts import Erasure
from kvstrata.contract.receipt.record import HandOverKind, Link, Receipt, read_receipt
from kvstrata.objects import labels, names
from kvstrata.objects.erasure import receipts
from kvstrata.objects.erasure.receipts import RECEIPT_DATA_KEY, build_receipt, read_receipt_objects
from kvstrata.objects.secret import build_signing_key
from kvstrata.plan.erasure.receipt_chain import ChainConflictError, ChainState
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.secrets import decode
from tests.support.memory_kube import MemoryKube
from tests.support.receipts import DOMAIN, NAMESPACE, erasure, issue, keys, lazy

WHERE = "kvstrata-system"
NOW = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
KEY, PUBLIC = ("Secret", WHERE, names.RECEIPTS_KEY_SECRET), ("ConfigMap", WHERE, names.RECEIPT_PUBLIC_KEYS)


@pytest.fixture
def kube() -> MemoryKube:
    return MemoryKube()


@pytest.fixture
def chains(kube: MemoryKube) -> Chains:
    return Chains(kube, WHERE, lambda: NOW)


@pytest.fixture
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects take so little that any receipt needs several."""
    monkeypatch.setattr(receipts, "MAX_PART_BYTES", 1500)


async def append(chains: Chains, facts: Erasure, told: ReceiptChain | None = None) -> Link:
    """Return the newest record of the chain, which has the receipt."""
    return newest_of(await chains.issue(NAMESPACE, DOMAIN, told, facts), facts)


def newest_of(chain: ChainState, facts: Erasure) -> Link:
    assert chain.newest is not None
    assert chain.digest_of(facts.subject.uid)
    return chain.newest


async def refusal(chains: Chains, facts: Erasure, told: ReceiptChain | None = None) -> str:
    with pytest.raises(ChainConflictError) as refused:
        await chains.issue(NAMESPACE, DOMAIN, told, facts)
    return str(refused.value)


def stored(kube: MemoryKube) -> list[Receipt]:
    """Every receipt, by number."""
    maps = {name: raw for (kind, _, name), raw in kube.objects.items() if kind == "ConfigMap"}
    found = [data for _, data in read_receipt_objects(maps)]
    return [read_receipt(data) for data in found if isinstance(data, bytes)]


def signing(kube: MemoryKube) -> SigningKeys:
    return SigningKeys.from_secret_data(decode(kube.objects[KEY]))


def use_key(kube: MemoryKube, keys: SigningKeys) -> None:
    """Put a key where the operator's is, as a person who rotates or restores it does."""
    kube.put(build_signing_key(WHERE, keys.secret_data()))


def give_up_key(kube: MemoryKube) -> None:
    """Say, as a person, that the key is lost for good."""
    public = kube.objects[PUBLIC]
    kube.put({**public, "metadata": {**public["metadata"], "annotations": {labels.ACCEPT_LOST_KEY: "fire"}}})


def verifies(kube: MemoryKube, *pinned: str) -> list[str]:
    """The orders of a chain that holds and that one key, if none is given the current one, vouches for."""
    chain = check_chain(stored(kube), is_signed, pinned or {signing(kube).current_id})
    assert not chain.unvouched
    return [one.link.subject_uid or "a hand-over" for one in chain.receipts]


async def test_a_receipt_that_the_api_server_refuses_is_refused_and_a_failure_of_the_server_is_not(
    kube: MemoryKube, chains: Chains
) -> None:
    why = KubeError(403, "Forbidden", "exceeded quota: configmaps")

    def refuse(verb: str, kind: str, name: str) -> None:
        raise why

    kube.before_write = refuse
    assert "exceeded quota: configmaps" in await refusal(chains, erasure("order-1"))
    why = KubeError(503, "ServiceUnavailable", "later")
    with pytest.raises(KubeError):
        await chains.issue(NAMESPACE, DOMAIN, None, erasure("order-1"))


class TestAChain:
    async def test_grows_by_a_receipt_for_each_order(self, kube: MemoryKube, chains: Chains) -> None:
        first, second = await append(chains, erasure("order-1")), await append(chains, lazy("order-2"))
        assert [first, second] == [one.link for one in stored(kube)]
        assert verifies(kube) == ["order-1", "order-2"]

    async def test_has_one_receipt_of_an_order_however_often_it_is_asked_for(
        self, kube: MemoryKube, chains: Chains
    ) -> None:
        first = await append(chains, erasure("order-1"))
        await append(chains, erasure("order-2"))
        written = len(kube.log)
        again = await chains.issue(NAMESPACE, DOMAIN, None, erasure("order-1"))
        assert (again.digest_of("order-1"), len(again.stored)) == (first.digest, 2)
        assert len(kube.log) == written

    async def test_of_another_domain_begins_at_one_with_the_same_key(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        other = await chains.issue("team-b", "ff" * 8, None, erasure("order-2"))
        assert newest_of(other, erasure("order-2")).head.sequence == 1
        assert {one.link.head.signer for one in stored(kube)} == {signing(kube).current_id}

    async def test_goes_on_behind_receipts_that_were_deleted_and_shows_the_hole(
        self, kube: MemoryKube, chains: Chains
    ) -> None:
        first = await append(chains, erasure("order-1"))
        kube.remove("ConfigMap", WHERE, names.receipt(DOMAIN, 1))
        second = await append(chains, erasure("order-2"), ReceiptChain(count=1, head=first.digest))
        assert second.head.sequence == 2
        assert [one.link.head.previous for one in stored(kube)] == [first.digest]

    async def test_whose_labels_somebody_removed_is_found_by_its_name(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        hidden = kube.objects[("ConfigMap", WHERE, names.receipt(DOMAIN, 1))]
        hidden["metadata"]["labels"] = {}
        assert (await append(chains, erasure("order-2"))).head.sequence == 2
        assert verifies(kube) == ["order-1", "order-2"]

    @pytest.mark.usefixtures("small_objects")
    async def test_takes_a_receipt_of_several_objects(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-9"))
        assert sum(name.startswith("kvstrata-part-") for _, _, name in kube.objects) >= 2
        assert verifies(kube) == ["order-9"]

    async def test_is_not_written_by_one_that_leads_no_more(self, kube: MemoryKube, chains: Chains) -> None:
        kube.may_write = lambda: False
        with pytest.raises(NotLeadingError):
            await chains.issue(NAMESPACE, DOMAIN, None, erasure())
        assert not kube.objects


class KilledError(BaseException):
    """Ends an operator where it stands."""


class TestAnOperatorThatDies:
    @pytest.mark.parametrize("when", ["before_write", "after_write"])
    @pytest.mark.parametrize("fixture", ["kube", "small_objects"])
    async def test_at_any_write_is_followed_by_one_that_writes_the_same(
        self, when: str, fixture: str, request: pytest.FixtureRequest
    ) -> None:
        request.getfixturevalue(fixture)
        facts, digests = erasure("order-1"), set()
        for write in range(1, 20):
            kube, writes = MemoryKube(), 0
            use_key(kube, keys())

            def kill(*_: str, at: int = write) -> None:
                nonlocal writes
                writes += 1
                if writes == at:
                    raise KilledError

            setattr(kube, when, kill)
            try:
                await Chains(kube, WHERE, lambda: NOW).issue(NAMESPACE, DOMAIN, None, facts)
            except KilledError:
                setattr(kube, when, lambda *_: None)
                done = await append(Chains(kube, WHERE, lambda: NOW), facts)
                digests.add(done.digest)
                assert verifies(kube) == [facts.subject.uid]
            else:
                break
        assert write > 2
        assert len(digests) == 1

    @pytest.mark.parametrize("when", ["before_write", "after_write"])
    async def test_when_there_is_no_key_yet_leaves_one_key_and_one_receipt(self, when: str) -> None:
        for write in range(1, 4):
            kube, writes = MemoryKube(), 0

            def kill(*_: str, at: int = write) -> None:
                nonlocal writes
                writes += 1
                if writes == at:
                    raise KilledError

            setattr(kube, when, kill)
            with pytest.raises(KilledError):
                await Chains(kube, WHERE, lambda: NOW).issue(NAMESPACE, DOMAIN, None, erasure("order-1"))
            made = kube.objects.get(KEY)
            setattr(kube, when, lambda *_: None)
            await append(Chains(kube, WHERE, lambda: NOW), erasure("order-1"))
            assert made in (None, kube.objects[KEY]), "a key that is there is left alone"
            assert verifies(kube) == ["order-1"]


class TestTwoAtOnce:
    @pytest.mark.parametrize("write", [1, 2, 3])
    async def test_write_one_chain_wherever_they_meet(self, write: int) -> None:
        kube, writes = MemoryKube(), 0

        def meanwhile(*_: str) -> None:
            nonlocal writes
            writes += 1
            if writes == write:
                kube.before_write = lambda *_: None
                run(Chains(kube, WHERE, lambda: NOW).issue(NAMESPACE, DOMAIN, None, erasure("order-2")))

        kube.before_write = meanwhile
        await until_written(kube, erasure("order-1"))
        assert sorted(verifies(kube)) == ["order-1", "order-2"]

    async def test_with_the_same_order_write_one_receipt(self, kube: MemoryKube) -> None:
        use_key(kube, keys())

        def meanwhile(verb: str, kind: str, name: str) -> None:
            if name.startswith(names.RECEIPT_PREFIX):
                kube.before_write = lambda *_: None
                run(Chains(kube, WHERE, lambda: NOW).issue(NAMESPACE, DOMAIN, None, erasure("order-1")))

        kube.before_write = meanwhile
        await until_written(kube, erasure("order-1"))
        assert verifies(kube) == ["order-1"]


async def until_written(kube: MemoryKube, facts: Erasure) -> None:
    """Ask again after each conflict, as who carries an erasure out does."""
    while True:
        try:
            await append(Chains(kube, WHERE, lambda: NOW), facts)
        except KubeError as error:
            if not error.is_conflict:
                raise
        else:
            return


def run(coroutine: Any) -> None:
    """Run to the end what never suspends."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


class TestTheKey:
    async def test_is_made_once_and_published_before_it_signs(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        assert [(verb, kind, name) for verb, kind, name in kube.log] == [
            ("create", "Secret", names.RECEIPTS_KEY_SECRET),
            ("create", "ConfigMap", names.RECEIPT_PUBLIC_KEYS),
            ("create", "ConfigMap", names.receipt(DOMAIN, 1)),
        ]
        assert kube.objects[PUBLIC]["data"].keys() == {f"{signing(kube).current_id}.pem"}

    @pytest.mark.parametrize("also_gone", [(), (PUBLIC,), (("ConfigMap", WHERE, names.receipt(DOMAIN, 1)),)])
    async def test_that_is_gone_is_not_replaced_in_silence(
        self, kube: MemoryKube, chains: Chains, also_gone: tuple[tuple[str, str, str], ...]
    ) -> None:
        await append(chains, erasure("order-1"))
        for slot in (KEY, *also_gone):
            kube.remove(*slot)
        written = len(kube.log)
        assert "the key that signs receipts is gone" in await refusal(chains, erasure("order-2"))
        assert len(kube.log) == written

    async def test_that_is_put_back_goes_on(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        kept = signing(kube)
        kube.remove(*KEY)
        await refusal(chains, erasure("order-2"))
        use_key(kube, kept)
        await append(chains, erasure("order-2"))
        assert verifies(kube) == ["order-1", "order-2"]

    async def test_that_a_person_gives_up_is_replaced_once_and_the_chain_shows_it(
        self, kube: MemoryKube, chains: Chains
    ) -> None:
        await append(chains, erasure("order-1"))
        lost = signing(kube).current_id
        kube.remove(*KEY)
        give_up_key(kube)
        assert (await append(chains, erasure("order-2"))).head.sequence == 3
        change = stored(kube)[1].record.hand_over
        assert change is not None
        assert change.kind is HandOverKind.LOST
        assert verifies(kube, lost, signing(kube).current_id) == ["order-1", "a hand-over", "order-2"]
        assert len(kube.objects[PUBLIC]["data"]) == 2
        kube.remove(*KEY)
        assert "is gone" in await refusal(chains, erasure("order-3")), "that word was for one key"

    async def test_is_not_given_up_by_a_word_from_before_it_was_lost(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        give_up_key(kube)
        await append(chains, erasure("order-2"))
        kube.remove(*KEY)
        assert "is gone" in await refusal(chains, erasure("order-3"))

    async def test_that_was_rotated_is_handed_over_before_the_next_receipt(
        self, kube: MemoryKube, chains: Chains
    ) -> None:
        use_key(kube, keys(1))
        await append(chains, erasure("order-1"))
        use_key(kube, keys(2, previous=1))
        assert (await append(chains, erasure("order-2"))).head.sequence == 3
        assert verifies(kube, keys(1).current_id) == ["order-1", "a hand-over", "order-2"]

    @pytest.mark.parametrize("data", [{}, {"current.pem": b"no key", "since": b"2026-11-20T08:00:00Z"}])
    async def test_that_cannot_be_used_is_named_and_left_alone(
        self, kube: MemoryKube, chains: Chains, data: dict[str, bytes]
    ) -> None:
        kube.put(build_signing_key(WHERE, data))
        before = kube.objects[KEY]
        message = await refusal(chains, erasure())
        assert message.startswith("Secret kvstrata-receipts-key of namespace kvstrata-system: ")
        assert kube.objects[KEY] == before
        assert len(kube.objects) == 1


class TestWhatSomebodyElsePutThere:
    async def test_is_not_continued_if_another_key_signed_it(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        before = kube.objects[("ConfigMap", WHERE, names.receipt(DOMAIN, 1))]["data"][RECEIPT_DATA_KEY].encode()
        (forged,) = build_receipt(WHERE, issue(keys(7), before, erasure("order-2")))
        kube.put(forged)
        message = await refusal(chains, erasure("order-3"))
        assert f"key {keys(7).current_id[:16]} was never the operator's" in message
        kube.remove("ConfigMap", WHERE, names.receipt(DOMAIN, 2))
        assert (await append(chains, erasure("order-3"))).head.sequence == 2

    async def test_is_not_continued_if_no_key_signed_it(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        own = kube.objects[("ConfigMap", WHERE, names.receipt(DOMAIN, 1))]
        own["data"][RECEIPT_DATA_KEY] = own["data"][RECEIPT_DATA_KEY].replace("forget-acme", "forget-zero")
        assert "SignatureForged" in await refusal(chains, erasure("order-2"))

    async def test_is_not_continued_if_status_tells_of_another(self, kube: MemoryKube, chains: Chains) -> None:
        await append(chains, erasure("order-1"))
        told = ReceiptChain(count=1, head=base64.b16encode(b"x" * 32).decode().lower())
        assert "is another than the one that the CacheDomain's status names" in await refusal(
            chains, erasure("order-2"), told
        )

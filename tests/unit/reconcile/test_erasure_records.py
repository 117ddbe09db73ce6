"""Records of erasures outlive the operator that wrote them, and lose nothing to another that writes, too."""

from __future__ import annotations

import asyncio
import base64
import random
from dataclasses import replace

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.redis.verifier import MAX_NAMES
from kvstrata.clients.resources import SECRET
from kvstrata.contract import ContractError
from kvstrata.contract.policy.keyspace import ScopeKind
from kvstrata.contract.receipt.facts import Amount, Revoked, Statement
from kvstrata.contract.receipt.vocabulary import KeyCustody, Party, RevokedKind
from kvstrata.model.erasure.facts import (
    EngineReset,
    HeldKey,
    JobState,
    KeyRemoved,
    ReceiptWritten,
    TierLost,
    Verdict,
)
from kvstrata.model.erasure.record import Erasure, ErasureRecord, LeftEpoch
from kvstrata.plan.rules.invalidation import MAX_ERASED_SCOPES
from kvstrata.reconcile.erasure.record_store import RecordStore, decode, encode, name_of
from tests.support.memory_kube import MemoryKube
from tests.support.receipts import OLD_EPOCH
from tests.unit.plan.erasures import (
    FILES,
    KEY,
    MEMORY,
    acked,
    at,
    deleted,
    ended,
    erased,
    fenced,
    order,
    probed,
    rolled,
    until_verified,
    witness,
)

NAMESPACE = "kvstrata-system"
EVERY_KIND = (
    *until_verified(),
    rolled(witness("p1", MEMORY, FILES)),
    ended("p3", 9.5),
    fenced("p4"),
    deleted("n3", state=JobState.RUNNING, ended=None, problem="it is being pulled"),
    EngineReset("p1", at(41.25)),
    TierLost("gone", at(42)),
    ReceiptWritten("d" * 64),
)


def record(*facts: object) -> ErasureRecord:
    """A record of an erasure of which these facts are known."""
    erasure = Erasure(order(excluded_scopes=("Public",), deadline_s=60)).with_facts(*facts)  # type: ignore[arg-type]
    epoch = LeftEpoch(ScopeKind.TENANT, "acme", "1" * 32, "2" * 32)
    keys = (HeldKey(KEY, OLD_EPOCH, KeyCustody.SECRET),)
    return ErasureRecord(
        "team-a", "acme-leaves", "d" * 16, (epoch,), keys, erasure, {"ab" * 16: ("00" * 32,)}, ("redis",)
    )


def test_what_is_written_of_each_kind_of_fact_is_what_is_read() -> None:
    whole = record(*EVERY_KIND)
    assert len({type(fact) for fact in whole.erasure.facts.values()}) == 12
    assert decode(encode(whole)) == whole
    judged = record(*EVERY_KIND, Verdict(True, "ErasedAndVerified", "all is gone", at(50)))
    assert decode(encode(judged)) == judged


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        encode(record()).replace(b'"version":1', b'"version":2'),
        encode(record(acked("p1"))).replace(b"PodSeen", b"PodHeard"),
        encode(record(deleted("n1"))).replace(b'"round":1', b'"round":"1"'),
    ],
)
def test_a_record_that_cannot_be_read_whole_is_not_read_at_all(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode(data)


def run(coroutine: object) -> object:
    return asyncio.run(coroutine)  # type: ignore[arg-type]


def test_another_operator_goes_on_from_what_was_kept() -> None:
    kube = MemoryKube()

    async def story() -> None:
        first, second = RecordStore(kube, NAMESPACE), RecordStore(kube, NAMESPACE)
        kept = await first.create(record())
        kept = await first.write(kept, record(rolled(), acked("p1")))
        found = await second.read("order-1")
        assert found == kept
        assert found is not None
        assert found.record == record(rolled(), acked("p1"))

    run(story())


def test_two_that_write_at_the_same_time_lose_nothing_of_each_other() -> None:
    kube = MemoryKube()

    async def story() -> None:
        first, second = RecordStore(kube, NAMESPACE), RecordStore(kube, NAMESPACE)
        mine, theirs = await first.create(record()), await second.create(record(acked("p9")))
        assert theirs == mine, "the first one stands"
        await first.write(mine, replace(record(rolled(), acked("p1")), named={"cd" * 16: ()}))
        both = await second.write(theirs, record(rolled(), acked("p2")))
        assert both.record.erasure.facts == record(rolled(), acked("p1"), acked("p2")).erasure.facts
        assert set(both.record.named) == {"ab" * 16, "cd" * 16}
        assert await first.read("order-1") == both

    run(story())


def test_after_a_verdict_of_another_nothing_is_added_but_the_receipt() -> None:
    kube = MemoryKube()
    judged = record(rolled(), Verdict(True, "ErasedAndVerified", "all is gone", at(50)))

    async def story() -> None:
        store = RecordStore(kube, NAMESPACE)
        old = await store.create(record(rolled()))
        await store.write(old, judged)
        after = await store.write(old, record(rolled(), acked("p1"), ReceiptWritten("d" * 64)))
        assert after.record.erasure.facts == judged.with_facts(ReceiptWritten("d" * 64)).erasure.facts

    run(story())


def test_a_write_that_changes_nothing_is_none() -> None:
    kube = MemoryKube()

    async def story() -> None:
        store = RecordStore(kube, NAMESPACE)
        kept = await store.create(record())
        writes = kube.writes
        assert await store.write(kept, record()) == kept
        assert kube.writes == writes

    run(story())


def test_a_record_that_is_gone_is_not_made_again_by_a_late_write() -> None:
    kube = MemoryKube()

    async def story() -> None:
        store = RecordStore(kube, NAMESPACE)
        kept = await store.create(record())
        await store.remove("order-1")
        await store.remove("order-1")
        assert await store.read("order-1") is None
        with pytest.raises(KubeError):
            await store.write(kept, record(acked("p1")))
        assert ("Secret", NAMESPACE, name_of("order-1")) not in kube.objects

    run(story())


def test_no_name_or_label_of_the_secret_tells_what_it_holds() -> None:
    kube = MemoryKube()
    run(RecordStore(kube, NAMESPACE).create(record(deleted("n1", found=Amount(1, 1)))))
    (secret,) = kube.objects.values()
    told = str(secret["metadata"])
    assert not any(word in told for word in ("acme", "ab" * 16, "1" * 32))


def test_an_erasure_of_as_many_scopes_as_one_takes_fits_into_a_secret() -> None:
    scopes, pods, chance = range(MAX_ERASED_SCOPES), range(300), random.Random(4)

    def hexadecimal(octets: int) -> str:
        return chance.randbytes(octets).hex()

    epochs = tuple(LeftEpoch(ScopeKind.TENANT, f"tenant-{n}", hexadecimal(16), hexadecimal(16)) for n in scopes)
    keyspaces = tuple(hexadecimal(16) for _ in scopes)
    keys = tuple(HeldKey(hexadecimal(32), hexadecimal(32), KeyCustody.SECRET) for _ in scopes)
    named = {keyspace: tuple(hexadecimal(32) for _ in range(2 * MAX_NAMES // len(scopes))) for keyspace in keyspaces}
    revoked = tuple(Revoked(RevokedKind.TENANT, None, key.revoked, hexadecimal(32)) for key in keys)
    witnesses = tuple(witness(f"{hexadecimal(16)}-{n}", MEMORY, FILES) for n in pods)
    word = Statement(Party.OPERATOR, "operator-1", "2026-01-01T00:00:00Z")
    facts = (
        replace(rolled(*witnesses, keys=keys), revoked=revoked),
        *(KeyRemoved(key.fingerprint, word) for key in keys),
        *(replace(told(one.uid), gate_boot=hexadecimal(16)) for one in witnesses for told in (acked, erased, probed)),
    )
    erasure = Erasure(order(keyspaces=keyspaces)).with_facts(*facts)
    whole = ErasureRecord("team-a", "everyone-leaves", "d" * 16, epochs, keys, erasure, named, ("redis", "other"))
    kube = MemoryKube()
    kept = asyncio.run(RecordStore(kube, NAMESPACE).create(whole))
    assert kept.record == whole
    (secret,) = kube.objects.values()
    assert sum(len(base64.b64decode(value)) for value in secret["data"].values()) < 1 << 20


async def test_a_record_that_another_leader_wrote_meanwhile_is_not_removed() -> None:
    kube = MemoryKube()
    store = RecordStore(kube, NAMESPACE)
    kept = await store.create(record())

    def another_writes(verb: str, kind: str, name: str) -> None:
        if verb == "delete":
            kube.before_write = lambda *_: None
            kube.put({**kube.objects[(kind, NAMESPACE, name)], "data": {}})

    kube.before_write = another_writes
    uid = kept.record.erasure.order.uid
    with pytest.raises(KubeError) as raised:
        await store.remove(uid)
    assert raised.value.is_conflict
    assert await kube.get(SECRET, NAMESPACE, name_of(uid)) is not None
    await store.remove(uid)
    assert await kube.get(SECRET, NAMESPACE, name_of(uid)) is None

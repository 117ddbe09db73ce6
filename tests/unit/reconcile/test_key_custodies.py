"""Custodies without a service of their own: Secrets as today, and the memory of operator and pods."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.contract import ContractError
from kvstrata.contract.messages.key_delivery import KeysHeld, pack_keys, unpack_keys
from kvstrata.contract.policy.data_key import DATA_KEY_BYTES, key_id
from kvstrata.contract.receipt.residue import Residue
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.model.keyholders import DIGITS, FormerHolders
from kvstrata.model.keys import LetGo, Release, Undestroyed
from kvstrata.objects import names
from kvstrata.reconcile.domain_store import DomainStore, Versions
from kvstrata.reconcile.keys import CustodyError, KeyCustody
from kvstrata.reconcile.keys.key_ring import MemoryCustody
from kvstrata.reconcile.keys.secret_custody import SecretCustody
from kvstrata.reconcile.secrets import decode
from tests.support.memory_keeper import MemoryKeeper
from tests.support.memory_kube import MemoryKube

NAMESPACE = "team-a"
OPERATOR = "operator-1"
OWNER = {"apiVersion": "kvstrata.io/v1alpha1", "kind": "CacheDomain", "name": "default", "uid": "u"}
ACME, GLOBEX = "a" * 32, "b" * 32
FORMER = FormerHolders({"operator-0": None})


class Clock:
    """A wall clock that goes on by a second at each look."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 22, 10, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


def memory(operator: str = OPERATOR, first: int = 1) -> MemoryCustody:
    drawn = iter(range(first, 256))
    return MemoryCustody(lambda n: bytes([next(drawn)]) * n, Clock(), operator)


def says(*held: str, revision: int = 5, cache_boot: str = "cache-1") -> KeysHeld:
    return KeysHeld("gate-1", cache_boot, revision, held)


class TestSecrets:
    @pytest.fixture
    def kube(self) -> MemoryKube:
        kube = MemoryKube()
        owner = {"name": OWNER["name"], "uid": OWNER["uid"], "namespace": NAMESPACE}
        kube.put({"apiVersion": OWNER["apiVersion"], "kind": OWNER["kind"], "metadata": owner, "spec": {}})
        return kube

    @pytest.fixture
    def custody(self, kube: MemoryKube) -> SecretCustody:
        drawn, clock = iter(range(1, 256)), Clock()
        keeper = MemoryKeeper(kube, "kvstrata-system", lambda n: bytes([next(drawn)]) * n, clock)
        return SecretCustody(keeper, DomainStore(NAMESPACE, Versions(clock)), OWNER, OPERATOR, clock)

    async def test_keys_are_drawn_once_into_the_secrets_of_today(self, custody: KeyCustody, kube: MemoryKube) -> None:
        await custody.draw([ACME, GLOBEX])
        keys = dict(await custody.unlock([ACME, GLOBEX]))
        await custody.draw([ACME])
        assert await custody.unlock([ACME, GLOBEX]) == keys
        assert decode(kube.objects["Secret", NAMESPACE, names.data_keys_secret(ACME)]) == {ACME: keys[ACME]}

    async def test_a_revoked_key_is_gone_from_its_secret_and_etcd_is_named(
        self, custody: KeyCustody, kube: MemoryKube
    ) -> None:
        await custody.draw([ACME, GLOBEX])
        revoked = (await custody.revoke([ACME]))[ACME]
        assert revoked.removed is not None
        assert revoked.removed.by is Party.OPERATOR
        assert revoked.residue == (Residue.ETCD_HISTORY, Residue.ETCD_BACKUPS)
        assert decode(kube.objects["Secret", NAMESPACE, names.data_keys_secret(ACME)]) == {}
        assert [*await custody.unlock([ACME, GLOBEX])] == [GLOBEX]

    async def test_no_key_is_ever_called_destroyed(self, custody: KeyCustody) -> None:
        await custody.draw([ACME])
        await custody.revoke([ACME])
        assert (await custody.destroy([ACME]))[ACME].why_not is Undestroyed.CUSTODY_CANNOT_KNOW

    async def test_a_refused_write_is_an_error_without_a_word(self, custody: KeyCustody, kube: MemoryKube) -> None:
        await custody.draw([ACME])

        def refuse(verb: str, kind: str, name: str) -> None:
            raise KubeError(403, "Forbidden", "no")

        kube.before_write = refuse
        with pytest.raises(CustodyError, match="403") as caught:
            await custody.revoke([ACME])
        assert ACME not in str(caught.value)


class TestMemory:
    async def test_a_key_is_drawn_once_and_printed_nowhere(self) -> None:
        custody = memory()
        drawing: KeyCustody = custody
        await drawing.draw([ACME])
        first = await drawing.unlock([ACME])
        await drawing.draw([ACME])
        assert await drawing.unlock([ACME, GLOBEX]) == first
        assert custody.ids([ACME, GLOBEX]) == {ACME: key_id(first[ACME])}
        assert repr(first[ACME])[2:-1] not in repr(custody._keys)

    async def test_what_is_packed_for_a_pod_are_its_keys(self) -> None:
        custody = memory()
        await custody.draw([ACME, GLOBEX])
        ids = custody.ids([ACME, GLOBEX])
        taken, strange = unpack_keys(custody.pack("pod-1", [ACME]), ids.values())
        assert [*taken] == [ids[ACME]]
        assert strange == 0

    async def test_a_key_is_gone_when_the_pods_that_it_was_brought_to_say_so(self) -> None:
        custody = memory()
        await custody.draw([ACME])
        custody.pack("pod-1", [ACME])
        custody.pack("pod-2", [ACME])
        mine = custody.ids([ACME])[ACME]
        assert (await custody.destroy([ACME]))[ACME].why_not is Undestroyed.NOT_REVOKED
        assert (await custody.revoke([ACME]))[ACME].removed is not None
        assert await custody.unlock([ACME]) == {}
        custody.hear("pod-1", says(), 5)
        for unfit in (says(mine), says(revision=4), says(cache_boot="")):
            custody.hear("pod-2", unfit, 5)
            assert (await custody.destroy([ACME]))[ACME].why_not is Undestroyed.HOLDERS_OPEN
        custody.hear("pod-2", says(), 5)
        confirmed = (await custody.destroy([ACME]))[ACME].confirmed
        assert confirmed is not None
        assert (confirmed.by, confirmed.name) == (Party.OPERATOR, OPERATOR)

    async def test_a_word_of_before_the_key_was_taken_back_says_nothing_of_its_end(self) -> None:
        custody = memory()
        await custody.draw([ACME])
        custody.pack("pod-1", [ACME])
        custody.hear("pod-1", says(), 5)  # it may still be on its way
        await custody.revoke([ACME])
        assert (await custody.destroy([ACME]))[ACME].why_not is Undestroyed.HOLDERS_OPEN

    async def test_a_stranger_s_word_or_end_counts_for_nobody(self) -> None:
        custody = memory()
        await custody.draw([ACME])
        custody.pack("pod-1", [ACME])
        await custody.revoke([ACME])
        custody.hear("pod-9", says(), 5)
        custody.ended("pod-9")
        assert (await custody.destroy([ACME]))[ACME].why_not is Undestroyed.HOLDERS_OPEN
        custody.ended("pod-1")
        assert (await custody.destroy([ACME]))[ACME].confirmed is not None

    async def test_the_key_s_buffer_is_overwritten_and_repeating_keeps_the_first_word(self) -> None:
        custody = memory()
        await custody.draw([ACME])
        buffer = custody._keys[ACME].secret
        first = await custody.revoke([ACME])
        assert buffer == bytearray(DATA_KEY_BYTES)
        assert await custody.revoke([ACME]) == first

    async def test_a_revoked_epoch_gets_no_second_key(self) -> None:
        custody = memory()
        await custody.draw([ACME])
        await custody.revoke([ACME])
        await custody.draw([ACME])
        assert await custody.unlock([ACME]) == {}
        assert len(custody.pack("pod-1", [ACME])) == len(pack_keys([]))

    async def test_what_it_never_had_it_neither_revokes_nor_calls_destroyed(self) -> None:
        custody = memory()
        assert (await custody.revoke([ACME]))[ACME].removed is None
        assert (await custody.destroy([ACME]))[ACME].confirmed is None


class TestAnOperatorThatWasStartedAnew:
    async def test_finds_its_keys_in_a_pod_and_takes_none_that_no_bundle_names(self) -> None:
        before = memory("operator-0")
        await before.draw([ACME, GLOBEX])
        named, keys = before.ids([ACME]), await before.unlock([ACME])
        body = before.pack("pod-1", [ACME, GLOBEX])
        after = memory(first=99)
        found = after.recover(body, named, FORMER, holders=["pod-1", "pod-2"])
        assert found == {ACME}
        assert not any(body), "the message is overwritten"
        await after.draw([ACME, GLOBEX])
        assert (await after.unlock([ACME, GLOBEX]))[ACME] == keys[ACME]
        assert (await after.unlock([ACME, GLOBEX]))[GLOBEX] == bytes([99]) * DATA_KEY_BYTES, "what was lost is cold"

    async def test_counts_all_pods_that_may_have_them_and_the_operator_before(self) -> None:
        before = memory("operator-0")
        await before.draw([ACME])
        after = memory()
        after.recover(before.pack("pod-1", [ACME]), before.ids([ACME]), FORMER, holders=["pod-1", "pod-2"])
        await after.revoke([ACME])
        after.hear("pod-1", says(), 5)
        assert (await after.destroy([ACME]))[ACME].why_not is Undestroyed.HOLDERS_OPEN
        after.ended("pod-2")
        assert (await after.destroy([ACME]))[ACME].why_not is Undestroyed.PREDECESSOR_UNKNOWN
        after.ended("operator-0")
        assert (await after.destroy([ACME]))[ACME].confirmed is not None

    async def test_does_not_take_a_key_back_that_it_has_revoked(self) -> None:
        custody = memory()
        await custody.draw([ACME])
        named, body = custody.ids([ACME]), custody.pack("pod-1", [ACME])
        await custody.revoke([ACME])
        assert not custody.recover(body, named, FORMER, holders=["pod-1"])
        assert await custody.unlock([ACME]) == {}

    async def test_counts_whoever_went_unseen_with_the_key_and_not_with_another(self) -> None:
        before = memory("operator-0")
        await before.draw([ACME, GLOBEX])
        ids = before.ids([ACME, GLOBEX])
        ended = Release("operator-0", LetGo.ENDED, "2026-11-22T10:00:00Z")
        former = FormerHolders({"operator-0": ended}, unaccounted={ids[ACME][:DIGITS]: "pod-0"})
        after = memory()
        after.recover(before.pack("pod-1", [ACME, GLOBEX]), ids, former, holders=["pod-1"])
        await after.revoke([ACME, GLOBEX])
        after.ended("pod-1")
        ends = await after.destroy([ACME, GLOBEX])
        assert ends[ACME].why_not is Undestroyed.HOLDERS_OPEN
        assert "pod-0" in ends[ACME].evidence[0]
        assert ends[GLOBEX].confirmed is not None

    async def test_knows_who_ended_before_it_turned_out_that_they_had_the_key(self) -> None:
        before = memory("operator-0")
        await before.draw([ACME])
        after = memory()
        after.ended("pod-1")
        after.ended("operator-0")
        after.recover(before.pack("pod-1", [ACME]), before.ids([ACME]), FORMER, holders=["pod-1"])
        await after.revoke([ACME])
        assert (await after.destroy([ACME]))[ACME].confirmed is not None

    async def test_has_a_key_that_it_never_had_called_destroyed_when_all_who_may_have_it_let_go(self) -> None:
        before = memory("operator-0")
        await before.draw([ACME])
        name = before.ids([ACME])[ACME]
        after = memory()
        after.remember(ACME, name, FormerHolders({"operator-0": None}, frozenset({"pod-1"})))
        assert (await after.revoke([ACME]))[ACME].removed is not None
        assert await after.unlock([ACME]) == {}
        after.hear("pod-1", says(name), 5)
        assert (await after.destroy([ACME]))[ACME].why_not is Undestroyed.HOLDERS_OPEN
        after.hear("pod-1", says(), 5)
        assert (await after.destroy([ACME]))[ACME].why_not is Undestroyed.PREDECESSOR_UNKNOWN
        after.let_go(Release("operator-0", LetGo.SAID, "2026-11-22T10:00:00Z"))
        assert (await after.destroy([ACME]))[ACME].confirmed is not None

    async def test_refuses_what_is_no_message(self) -> None:
        with pytest.raises(ContractError):
            memory().recover(bytearray(b"junk"), {}, FORMER, holders=[])

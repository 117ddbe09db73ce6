"""Data keys wrapped by a real OpenBao: drawn once, unwrapped, revoked, and ended so that no backup opens them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.transit import TransitClient
from kvstrata.contract.receipt.vocabulary import Party
from kvstrata.model.keys import Undestroyed
from kvstrata.objects import labels
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.kms_custody import KmsCustody
from kvstrata.reconcile.keys.wrapped_keys import COMPONENT, WrappedKey, WrappedKeys, wrapping_key
from tests.custody.bao_server import MOUNT, BaoServer
from tests.custody.kms_stories import unlock
from tests.custody.token_file import OpenedClient, TokenFile, nothing
from tests.support.memory_kube import MemoryKube
from tests.support.worlds import Killed

NAMESPACE = "team-a"
OPERATOR = "operator-1"
ACME, GLOBEX = "a" * 32, "b" * 32
NOW = "2026-11-22T10:00:00Z"


@pytest.fixture
def kube() -> MemoryKube:
    return MemoryKube()


@pytest.fixture
def custody_of(client: TransitClient, kube: MemoryKube, request: pytest.FixtureRequest) -> Callable[..., KmsCustody]:
    """Each test has a domain of its own in the one server."""
    domain = base64.b32encode(request.node.name.encode()).decode().rstrip("=")[-40:]

    def make(asked: TransitClient = client) -> KmsCustody:
        stored = WrappedKeys(kube, NAMESPACE, domain)
        return KmsCustody(asked, stored, lambda: datetime(2026, 11, 22, 10, tzinfo=UTC), OPERATOR, nothing)

    return make


@pytest.fixture
def custody(custody_of: Callable[..., KmsCustody]) -> KmsCustody:
    return custody_of()


def root_token(file: Path, bao: BaoServer) -> None:
    file.write_text(bao.token(policies=["root"], no_default_policy=False))


def stored(kube: MemoryKube, epoch: str = ACME) -> bytes:
    """Return an epoch's record as a backup would have it."""
    return base64.b64decode(secret_of(kube, epoch)["data"][epoch])


def secret_of(kube: MemoryKube, epoch: str) -> Any:
    """The Secret in which an epoch's record is."""
    (found,) = (raw for (_, _, name), raw in kube.objects.items() if name.endswith(f"-{epoch[:1]}"))
    return found


async def test_a_key_is_drawn_once_and_no_secret_has_it(custody: KmsCustody, kube: MemoryKube) -> None:
    await custody.draw([ACME, GLOBEX])
    keys = await unlock(custody, [ACME, GLOBEX])
    assert len({*keys.values()}) == 2
    await custody.draw([GLOBEX, ACME])
    assert await unlock(custody, [ACME, GLOBEX]) == keys
    for key in keys.values():
        for shape in (key, base64.b64encode(key), key.hex().encode()):
            assert not any(shape in stored(kube, epoch) for epoch in keys)


async def test_the_operator_that_was_started_anew_has_the_same_keys(
    custody: KmsCustody, custody_of: Callable[..., KmsCustody]
) -> None:
    await custody.draw([ACME])
    assert await unlock(custody_of(), [ACME]) == await unlock(custody, [ACME])


async def test_a_destroyed_key_opens_from_no_backup_and_its_neighbour_still_does(
    custody: KmsCustody, client: TransitClient, kube: MemoryKube
) -> None:
    await custody.draw([ACME, GLOBEX])
    keys = await unlock(custody, [ACME, GLOBEX])
    backup = WrappedKey.decode(stored(kube))
    assert backup is not None
    assert await client.unwrap(backup.key, backup.wrapped) == keys[ACME], "the backup opens while the key is there"
    revoked = (await custody.revoke([ACME]))[ACME]
    assert revoked is not None
    assert (revoked.by, revoked.name, revoked.at) == (Party.OPERATOR, OPERATOR, NOW)
    assert backup.wrapped.encode() not in stored(kube)
    destroyed = (await custody.destroy([ACME])).whole()[ACME]
    assert destroyed.confirmed is not None
    assert destroyed.confirmed.by is Party.CUSTODY
    for epoch in (ACME, GLOBEX):
        assert not any(epoch in line for line in destroyed.evidence)
    with pytest.raises(Exception, match="encryption key not found"):
        await client.unwrap(backup.key, backup.wrapped)
    assert await unlock(custody, [ACME, GLOBEX]) == {GLOBEX: keys[GLOBEX]}


async def test_a_key_that_was_not_revoked_is_not_destroyed(custody: KmsCustody) -> None:
    await custody.draw([ACME])
    assert (await custody.destroy([ACME])).whole()[ACME].why_not is Undestroyed.NOT_REVOKED
    assert len(await unlock(custody, [ACME])) == 1


async def test_what_is_stored_nowhere_is_given_to_nobody_and_not_called_destroyed(custody: KmsCustody) -> None:
    assert (await custody.revoke([ACME]))[ACME] is not None
    assert (await custody.destroy([ACME])).whole()[ACME].why_not is Undestroyed.CUSTODY_CANNOT_KNOW


async def test_what_nobody_can_read_is_not_called_revoked(custody: KmsCustody, kube: MemoryKube) -> None:
    await custody.draw([ACME])
    secret_of(kube, ACME)["data"][ACME] = base64.b64encode(b"of another version").decode()
    assert (await custody.revoke([ACME]))[ACME] is None
    secret_of(kube, ACME)["data"][ACME] = "no base64"
    assert (await custody.revoke([ACME]))[ACME] is None


async def test_a_revoked_epoch_gets_no_second_key_and_what_was_said_stays(
    custody: KmsCustody, kube: MemoryKube
) -> None:
    await custody.draw([ACME])
    first = await custody.revoke([ACME])
    await custody.draw([ACME])
    assert await unlock(custody, [ACME]) == {}
    assert await custody.revoke([ACME]) == first


@pytest.mark.parametrize("after", [False, True])
async def test_a_death_at_any_write_of_a_key_s_end_changes_nothing_of_it(
    after: bool, custody_of: Callable[..., KmsCustody], kube: MemoryKube, client: TransitClient
) -> None:
    await custody_of().draw([ACME])
    record = WrappedKey.decode(stored(kube))
    assert record is not None

    def die(verb: str, kind: str, name: str) -> None:
        raise Killed

    setattr(kube, "after_write" if after else "before_write", die)
    with pytest.raises(Killed):
        await custody_of().revoke([ACME])
    kube.before_write = kube.after_write = lambda *_: None
    assert (await custody_of().revoke([ACME]))[ACME] is not None
    await client.delete(record.key)  # and here between what the service did and what was heard of it
    destroyed = (await custody_of().destroy([ACME])).whole()[ACME]
    assert destroyed.confirmed is not None
    assert "had been deleted before" in destroyed.evidence[0]
    await custody_of().forget([ACME])
    assert (await custody_of().destroy([ACME])).whole()[ACME].why_not is Undestroyed.CUSTODY_CANNOT_KNOW


async def test_of_two_operators_that_draw_at_once_one_key_stays(
    custody_of: Callable[..., KmsCustody], kube: MemoryKube
) -> None:
    slow, fast = custody_of(), custody_of()
    drawn: dict[str, Any] = {}

    class Overtaken(WrappedKeys):
        async def change(self, name: str, change: Any) -> None:
            await fast.draw([ACME])
            drawn.update(await unlock(fast, [ACME]))
            await super().change(name, change)

    slow._stored = Overtaken(kube, NAMESPACE, slow.domain)
    await slow.draw([ACME])
    assert drawn
    assert await unlock(slow, [ACME]) == drawn


async def test_a_conflict_of_writes_is_an_error_and_overwrites_nothing(custody: KmsCustody, kube: MemoryKube) -> None:
    def conflict(verb: str, kind: str, name: str) -> None:
        raise KubeError(409, "Conflict", "somebody else wrote it")

    kube.before_write = conflict
    with pytest.raises(CustodyError, match="409"):
        await custody.draw([ACME])
    kube.before_write = lambda *_: None
    await custody.draw([ACME])
    assert len(await unlock(custody, [ACME])) == 1


async def test_a_service_that_was_set_up_anew_cannot_say_that_a_key_is_gone(
    custody: KmsCustody, kube: MemoryKube
) -> None:
    """Its emptiness is no deletion: the record of a key says which service wrapped it."""
    await custody.draw([ACME])
    _rewrite(kube, service="another-cluster")
    with pytest.raises(CustodyError, match="another one answers"):
        await unlock(custody, [ACME])
    await custody.revoke([ACME])
    assert (await custody.destroy([ACME])).whole()[ACME].why_not is Undestroyed.ANOTHER_KMS


async def test_another_mount_of_the_same_service_cannot_either(
    custody: KmsCustody, custody_of: Callable[..., KmsCustody], bao: BaoServer, tmp_path: Path
) -> None:
    await custody.draw([ACME])
    await custody.revoke([ACME])
    bao.admin("POST", "sys/mounts/elsewhere", {"type": "transit"})
    try:
        root_token(tmp_path / "root", bao)
        async with OpenedClient(
            bao.address, bao.authority_pem, TokenFile(tmp_path / "root"), mount="elsewhere"
        ) as client:
            assert (await custody_of(client).destroy([ACME])).whole()[ACME].why_not is Undestroyed.ANOTHER_KMS
    finally:
        bao.admin("DELETE", "sys/mounts/elsewhere")
    assert (await custody.destroy([ACME])).whole()[ACME].confirmed is not None


async def test_a_wrapping_key_that_may_be_taken_out_is_not_used_and_proves_nothing(
    custody: KmsCustody, bao: BaoServer
) -> None:
    await custody.draw([GLOBEX])
    name = wrapping_key(custody.domain, ACME)
    bao.admin("POST", f"{MOUNT}/keys/{name}", {"exportable": True})
    with pytest.raises(CustodyError, match="may be taken out"):
        await custody.draw([ACME])
    bao.admin("POST", f"{MOUNT}/keys/{wrapping_key(custody.domain, GLOBEX)}/config", {"exportable": True})
    await custody.revoke([GLOBEX])
    assert (await custody.destroy([GLOBEX])).whole()[GLOBEX].why_not is Undestroyed.EXPORTABLE


async def test_without_the_service_nothing_is_claimed_and_the_error_names_it(
    custody: KmsCustody, bao: BaoServer
) -> None:
    await custody.draw([ACME])
    revoked = await custody.revoke([ACME])
    assert revoked[ACME] is not None, "the Secret is the operator's own"
    bao.seal()
    try:
        with pytest.raises(CustodyError, match="Sealed"):
            (await custody.destroy([ACME])).whole()
        with pytest.raises(CustodyError, match="Sealed"):
            await custody.draw([GLOBEX])
    finally:
        bao.unseal()
    assert (await custody.destroy([ACME])).whole()[ACME].confirmed is not None


def test_what_the_service_calls_a_key_tells_no_epoch() -> None:
    assert ACME not in wrapping_key("d" * 16, ACME)
    assert wrapping_key("d" * 16, ACME) != wrapping_key("e" * 16, ACME)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"3", b'{"service":"s","place":1,"key":"k"}', bytes(32)])
def test_what_is_no_record_is_no_key(data: bytes) -> None:
    assert WrappedKey.decode(data) is None


def _rewrite(kube: MemoryKube, **fields: str) -> None:
    record = WrappedKey.decode(stored(kube))
    assert record is not None
    secret_of(kube, ACME)["data"][ACME] = base64.b64encode(replace(record, **fields).encode()).decode()


async def test_another_domain_s_record_is_neither_unwrapped_nor_lets_its_key_be_deleted(
    custody: KmsCustody, client: TransitClient, kube: MemoryKube
) -> None:
    """Whoever may write Secrets of one namespace could otherwise read, or end, what another has in the same service."""
    await custody.draw([ACME])
    record = WrappedKey.decode(stored(kube))
    assert record is not None
    stored_in = WrappedKeys(kube, NAMESPACE, "another")
    strange = KmsCustody(client, stored_in, lambda: datetime(2026, 11, 22, 10, tzinfo=UTC), OPERATOR, nothing)
    metadata = {"name": stored_in.name_of(ACME), "namespace": NAMESPACE, "labels": labels.of_custody(COMPONENT)}
    for planted in (record, replace(record, wrapped="", revoked_at=NOW)):
        data = {ACME: base64.b64encode(planted.encode()).decode()}
        kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        assert await unlock(strange, [ACME]) == {}
        assert {*(await strange.records()).unusable} == {ACME}
        assert (await strange.revoke([ACME]))[ACME] is None
    assert (await strange.destroy([ACME])).whole()[ACME].why_not is Undestroyed.CUSTODY_CANNOT_KNOW
    assert await client.is_copyable(record.key) is not None


async def test_one_record_that_cannot_be_opened_keeps_no_key_of_its_secret_away(
    custody: KmsCustody, kube: MemoryKube
) -> None:
    first, *rest = (ACME[:-1] + digit for digit in "0123456789")
    await custody.draw([first, *rest])
    keys = await unlock(custody, rest)
    secret = secret_of(kube, first)
    record = WrappedKey.decode(stored(kube, first))
    assert record is not None
    secret["data"][first] = base64.b64encode(replace(record, service="another").encode()).decode()
    opened = await custody.open([first, *rest, GLOBEX])
    assert opened.found == {**keys, GLOBEX: None}
    assert "another one answers" in str(opened.failure)
    secret["data"][first] = base64.b64encode(replace(record, wrapped="vault:v1:AAAA").encode()).decode()
    opened = await custody.open([first, *rest])
    assert opened.found == keys
    assert "Refused" in str(opened.failure)

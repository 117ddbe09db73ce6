"""Objects of others in the operator's namespace, under names that the operator needs, are refused by name and stay."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.resources import CONFIG_MAP, JOB, NETWORK_POLICY, SECRET
from kvstrata.objects import labels, names
from kvstrata.plan.erasure.receipt_chain import ChainConflictError
from kvstrata.reconcile.claims import NameConflictError
from kvstrata.reconcile.erasure.receipt_chain import Chains
from kvstrata.reconcile.erasure.record_store import PREFIX, RecordStore, name_of
from kvstrata.reconcile.keys import CustodyError
from kvstrata.reconcile.keys.wrapped_keys import WrappedKeys
from kvstrata.reconcile.secrets import AUTHORITY_SECRET, SecretStore
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE as TEAM
from tests.support.receipts import DOMAIN, NAMESPACE, erasure
from tests.unit.reconcile.deletion_jobs import ERASURE, JOB_NAME, NOW, WHERE, jobs_of, order, server_of_a_tier, the_job
from tests.unit.reconcile.erasing import World
from tests.unit.reconcile.erasure_stories import acked, run, world
from tests.unit.reconcile.erasure_stories import order as erase
from tests.unit.reconcile.test_erasure_records import record

Raw = dict[str, Any]


def foreign(api_version: str, kind: str, name: str, own: dict[str, str] | None = None, **content: Any) -> Raw:
    """Return an object that a person or a tool made for themselves."""
    metadata = {"name": name, "namespace": WHERE, "labels": own or {labels.MANAGED_BY: "Helm"}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def foreign_secret(name: str) -> Raw:
    return foreign("v1", "Secret", name, data={"theirs": "b3du"})


def untouched(kube: MemoryKube, theirs: Raw) -> Callable[[], bool]:
    """Return whether the object of others, stored now, is still as it was stored."""
    kube.put(theirs)
    slot = theirs["kind"], WHERE, theirs["metadata"]["name"]
    before = kube.objects[slot]
    return lambda: kube.objects.get(slot) == before


class TestJobs:
    @pytest.mark.parametrize("suspend", [True, False])
    async def test_a_job_of_others_is_neither_resumed_nor_reported(self, suspend: bool) -> None:
        kube = server_of_a_tier()
        kept = untouched(kube, foreign("batch/v1", "Job", JOB_NAME, spec={"suspend": suspend}))
        jobs = jobs_of(kube)
        with pytest.raises(NameConflictError, match=f"Job {JOB_NAME} belongs to others"):
            await jobs.start(order())
        with pytest.raises(NameConflictError):
            await jobs.look(ERASURE, "shared", 1)
        await jobs.remove(ERASURE)
        assert kept()

    async def test_a_job_with_the_label_of_the_erasure_alone_is_not_removed(self) -> None:
        kube = server_of_a_tier()
        kept = untouched(kube, foreign("batch/v1", "Job", "theirs", {labels.ERASURE: ERASURE}, spec={}))
        await jobs_of(kube).start(order())
        await jobs_of(kube).remove(ERASURE)
        assert kept()
        assert (JOB.kind, WHERE, JOB_NAME) not in kube.objects

    @pytest.mark.parametrize("resource", [SECRET, NETWORK_POLICY])
    async def test_a_job_does_not_begin_with_an_object_of_others(self, resource: Any) -> None:
        kube = server_of_a_tier()
        kept = untouched(kube, foreign(resource.api_version, resource.kind, JOB_NAME, labels.of_deletion(ERASURE)))
        with pytest.raises(NameConflictError, match=f"{resource.kind} {JOB_NAME} belongs to others"):
            await jobs_of(kube).start(order())
        assert kept()
        assert the_job(kube)["spec"]["suspend"] is True
        kube.remove(resource.kind, WHERE, JOB_NAME)
        assert (await jobs_of(kube).start(order())).begun


class TestRecords:
    async def test_a_secret_of_others_is_neither_read_nor_removed(self) -> None:
        kube, kept_record = MemoryKube(), record()
        uid = kept_record.erasure.order.uid
        kept = untouched(kube, foreign_secret(name_of(uid)))
        store = RecordStore(kube, WHERE)
        for call in (store.read(uid), store.create(kept_record), store.remove(uid)):
            with pytest.raises(NameConflictError, match=f"Secret {name_of(uid)} belongs to others"):
                await call
        assert kept()

    def test_the_order_shows_it_as_one_event_and_continues_afterwards(self) -> None:
        async def story(made: World) -> None:
            erase(made.sim)
            kube = made.sim.kube
            name = name_of(kube.objects["CacheInvalidation", TEAM, "leave"]["metadata"]["uid"])
            kept = untouched(kube, foreign_secret(name))
            for _ in range(5):
                await made.turn(10)
            found = [raw for (kind, *_), raw in kube.objects.items() if kind == "Event"]
            assert [one["message"] for one in found if one["reason"] == "NameConflict"] == [
                f"Secret {name} belongs to others: delete or rename it in the operator's namespace. The erasure waits"
            ]
            assert kept()
            kube.remove("Secret", WHERE, name)
            await acked(made)
            await made.until(lambda: made.phase == "Complete")

        run(story, world())

    def test_the_order_shows_that_its_record_is_refused_as_one_event(self) -> None:
        async def story(made: World) -> None:
            def refuse(_verb: str, kind: str, name: str) -> None:
                if kind == "Secret" and name.startswith(PREFIX):
                    raise KubeError(403, "Forbidden", f'secrets "{name}" is forbidden: exceeded quota: few')

            erase(made.sim)
            kube = made.sim.kube
            kube.before_write = refuse
            for _ in range(5):
                await made.turn(10)
            found = [raw for (kind, *_), raw in kube.objects.items() if kind == "Event"]
            (message,) = [one["message"] for one in found if one["reason"] == "Forbidden"]
            assert message.endswith("is forbidden: exceeded quota: few: admit it. The erasure waits")
            kube.before_write = lambda *_: None
            await acked(made)
            await made.until(lambda: made.phase == "Complete")

        run(story, world())


async def test_public_keys_are_not_written_into_a_config_map_of_others() -> None:
    kube = MemoryKube()
    kept = untouched(kube, foreign("v1", "ConfigMap", names.RECEIPT_PUBLIC_KEYS, data={"theirs": "x"}))
    with pytest.raises(ChainConflictError, match=f"ConfigMap {names.RECEIPT_PUBLIC_KEYS} belongs to others"):
        await Chains(kube, WHERE, lambda: NOW).issue(NAMESPACE, DOMAIN, None, erasure("order-1"))
    assert kept()
    assert not [slot for slot in kube.objects if slot[0] == CONFIG_MAP.kind and slot[2] != names.RECEIPT_PUBLIC_KEYS]


async def test_wrapped_keys_are_not_written_into_a_secret_of_others() -> None:
    kube, epoch = MemoryKube(), "0" * 32
    wrapped = WrappedKeys(kube, WHERE, DOMAIN)
    kept = untouched(kube, foreign_secret(wrapped.name_of(epoch)))
    with pytest.raises(CustodyError, match="NameConflict"):
        await wrapped.change("0", lambda own: {epoch: None})
    with pytest.raises(CustodyError, match="NameConflict"):
        await wrapped.remove()
    assert kept()


@pytest.mark.parametrize("changed", [names.CERTIFICATE_KEY, names.PRIVATE_KEY_KEY])
@pytest.mark.parametrize("with_another", [True, False], ids=["of another pair", "no PEM"])
async def test_an_authority_that_issues_nothing_ends_the_start_by_name(*, changed: str, with_another: bool) -> None:
    kube, others = MemoryKube(), MemoryKube()
    for one in (kube, others):
        await SecretStore(one, WHERE, secrets.token_bytes, lambda: NOW).open()
    stored, other = (one.objects[SECRET.kind, WHERE, AUTHORITY_SECRET] for one in (kube, others))
    replaced = other["data"][changed] if with_another else base64.b64encode(b"none").decode()
    kube.put({**stored, "data": {**stored["data"], changed: replaced}})
    written, again = kube.writes, SecretStore(kube, WHERE, secrets.token_bytes, lambda: NOW)
    with pytest.raises(ValueError, match=f"Secret {AUTHORITY_SECRET} of namespace {WHERE}: .*put back the pair"):
        await again.open()
    assert not again.is_open
    assert kube.writes == written


async def test_an_authority_of_others_ends_the_start_by_name() -> None:
    kube = MemoryKube()
    kept = untouched(kube, foreign_secret(AUTHORITY_SECRET))
    with pytest.raises(NameConflictError, match=f"Secret {AUTHORITY_SECRET} belongs to others"):
        await SecretStore(kube, WHERE, secrets.token_bytes, lambda: NOW).open()
    assert kept()

"""Deletions as Jobs over an API server in memory: begun once whoever dies, and removed with all that is theirs."""

from __future__ import annotations

import base64
import json

import pytest

from kvstrata.clients.kube import KubeError, NotLeadingError
from kvstrata.clients.resources import JOB, NETWORK_POLICY, SECRET
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.erasure.facts import JobState
from kvstrata.objects import labels, names
from kvstrata.objects.erasure.delete_job import ORDER_FILE
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.reconcile.erasure.jobs import Jobs
from kvstrata.reconcile.store import Store
from kvstrata_sidecar.delete_job.order import Order
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE
from tests.unit.reconcile.deletion_jobs import (
    AUTHORITY,
    CONTEXT,
    ERASURE,
    JOB_NAME,
    NOW,
    PASSWORD,
    WHERE,
    WHOLE,
    ends,
    is_over,
    jobs_of,
    order,
    seen,
    server_of_a_tier,
    the_job,
    tier,
)


@pytest.fixture
def kube() -> MemoryKube:
    return server_of_a_tier()


@pytest.fixture
def jobs(kube: MemoryKube) -> Jobs:
    return jobs_of(kube)


class TestBeginning:
    async def test_it_begins_when_all_that_it_needs_is_there(self, kube: MemoryKube, jobs: Jobs) -> None:
        run = await jobs.start(order())
        assert [(verb, kind) for verb, kind, _ in kube.log[2:]] == [
            ("create", "Job"),
            ("create", "Secret"),
            ("create", "NetworkPolicy"),
            ("replace", "Job"),
        ]
        assert (run.state, run.job) == (JobState.RUNNING, the_job(kube)["metadata"]["uid"])
        assert the_job(kube)["spec"]["suspend"] is False

    async def test_its_secret_has_copies_of_what_the_tier_is_reached_with_and_is_its_own(
        self, kube: MemoryKube, jobs: Jobs
    ) -> None:
        run = await jobs.start(order())
        made = kube.objects[(SECRET.kind, WHERE, JOB_NAME)]
        data = {key: base64.b64decode(value) for key, value in made["data"].items()}
        assert data.keys() == {"password", "ca.crt", ORDER_FILE}
        assert (data["password"], data["ca.crt"]) == (PASSWORD, AUTHORITY)
        assert made["immutable"] is True
        for slot in ((SECRET.kind, WHERE, JOB_NAME), (NETWORK_POLICY.kind, WHERE, JOB_NAME)):
            assert [one["uid"] for one in kube.objects[slot]["metadata"]["ownerReferences"]] == [run.job]

    async def test_its_order_limits_servers_that_the_operator_does_not_run(self, kube: MemoryKube) -> None:
        limits = AllowedServers(("*.cache.example",), ("10.0.0.0/8",), ("10.96.0.1",))
        jobs = Jobs(kube, CONTEXT, lambda: NOW, allowed=lambda: limits)
        external = {"external": {"endpoints": ["a.cache.example:6379"], "cluster": True}}
        for turn, (one, expected) in enumerate([(tier(), None), (tier(redis=external), limits)], 1):
            await jobs.start(order(turn, tier=one))
            made = kube.objects[(SECRET.kind, WHERE, names.deletion_job(ERASURE, "shared", turn))]
            assert Order.from_json(json.loads(base64.b64decode(made["data"][ORDER_FILE]))).tier.allowed == expected
        policy = kube.objects[(NETWORK_POLICY.kind, WHERE, names.deletion_job(ERASURE, "shared", 2))]
        assert "10.96.0.1/32" in json.dumps(policy), "its network does, too"

    async def test_ordered_twice_it_is_begun_once(self, kube: MemoryKube, jobs: Jobs) -> None:
        first = await jobs.start(order())
        written = len(kube.log)
        assert (await jobs.start(order())).job == first.job
        assert len(kube.log) == written

    async def test_the_next_round_is_another_job(self, kube: MemoryKube, jobs: Jobs) -> None:
        first, second = await jobs.start(order()), await jobs.start(order(2))
        assert first.job != second.job
        assert await jobs.look(ERASURE, "shared", 3) is None

    async def test_nothing_is_made_where_the_password_is_missing(self, kube: MemoryKube, jobs: Jobs) -> None:
        kube.remove("Secret", NAMESPACE, names.redis_auth("shared"))
        with pytest.raises(LookupError, match="Secret kvs-shared-redis-auth of CacheTier shared does not exist"):
            await jobs.start(order())
        assert await jobs.look(ERASURE, "shared", 1) is None

    async def test_nothing_is_made_of_more_keyspaces_than_one_takes(self, kube: MemoryKube, jobs: Jobs) -> None:
        with pytest.raises(ValueError, match="more than one deletion"):
            await jobs.start(order(keyspaces=tuple(f"{n:032x}" for n in range(30_000))))
        assert await jobs.look(ERASURE, "shared", 1) is None

    async def test_one_that_leads_no_more_writes_nothing(self, kube: MemoryKube, jobs: Jobs) -> None:
        written, kube.may_write = len(kube.log), lambda: False
        with pytest.raises(NotLeadingError):
            await jobs.start(order())
        assert len(kube.log) == written

    async def test_a_controller_that_writes_meanwhile_does_not_keep_it_from_beginning(
        self, kube: MemoryKube, jobs: Jobs
    ) -> None:
        def as_its_controller(verb: str, kind: str, name: str) -> None:
            if (verb, kind) == ("replace", "Job"):
                kube.before_write = lambda *_: None
                is_over(kube, "Suspended", "JobSuspended", "")

        kube.before_write = as_its_controller
        await jobs.start(order())
        assert the_job(kube)["spec"]["suspend"] is False


class KilledError(BaseException):
    """Ends an operator where it stands."""


def kills() -> list[tuple[str, int]]:
    """Before and after each of the four writes."""
    return [(when, write) for when in ("before_write", "after_write") for write in range(1, 5)]


class TestAnOperatorThatDies:
    @pytest.mark.parametrize(("when", "write"), kills())
    async def test_at_any_write_leaves_what_the_next_one_completes(
        self, kube: MemoryKube, jobs: Jobs, when: str, write: int
    ) -> None:
        writes = 0

        def kill(*_: str) -> None:
            nonlocal writes
            writes += 1
            if writes == write:
                raise KilledError

        setattr(kube, when, kill)
        with pytest.raises(KilledError):
            await jobs.start(order())
        setattr(kube, when, lambda *_: None)
        left = kube.objects.get((JOB.kind, WHERE, JOB_NAME))
        begun = left is not None and not left["spec"]["suspend"]
        assert begun == ((when, write) == ("after_write", 4)), "nothing runs before all is there"
        orphans = {slot for slot in kube.objects if slot[1:] == (WHERE, JOB_NAME)} - {(JOB.kind, WHERE, JOB_NAME)}
        assert left is not None or not orphans
        run = await Jobs(kube, CONTEXT, lambda: NOW).start(order())
        assert run.job == (left or the_job(kube))["metadata"]["uid"]
        assert {kind for kind, where, name in kube.objects if (where, name) == (WHERE, JOB_NAME)} == {
            "Job",
            "Secret",
            "NetworkPolicy",
        }
        assert the_job(kube)["spec"]["suspend"] is False

    async def test_one_that_only_looks_says_that_it_has_not_begun(self, kube: MemoryKube, jobs: Jobs) -> None:
        def kill(verb: str, kind: str, name: str) -> None:
            if kind == "Secret":
                raise KilledError

        kube.before_write = kill
        with pytest.raises(KilledError):
            await jobs.start(order())
        run = await seen(jobs)
        assert (run.state, run.problem) == (
            JobState.RUNNING,
            "it has not begun: something that it needs is missing",
        )

    async def test_two_that_begin_it_at_once_begin_one(self, kube: MemoryKube, jobs: Jobs) -> None:
        others: list[DeletionRun] = []

        def meanwhile(verb: str, kind: str, name: str) -> None:
            kube.before_write = lambda *_: None
            coroutine = Jobs(kube, CONTEXT, lambda: NOW).start(order())
            try:
                coroutine.send(None)
            except StopIteration as answer:
                others.append(answer.value)

        kube.before_write = meanwhile
        run = await jobs.start(order())
        assert [other.job for other in others] == [run.job]


class TestRemoval:
    async def test_takes_every_job_of_the_erasure_and_of_no_other(self, kube: MemoryKube, jobs: Jobs) -> None:
        for one in (order(), order(2), order(erasure="order-2")):
            await jobs.start(one)
        await jobs.remove(ERASURE)
        left = {name for _, where, name in kube.objects if where == WHERE}
        assert left == {names.deletion_job("order-2", "shared", 1)}, "with all that was made for them"
        await jobs.remove(ERASURE)

    async def test_takes_a_secret_that_lost_its_job_and_none_of_others(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        kept = kube.objects[SECRET.kind, WHERE, JOB_NAME]
        kube.remove(JOB.kind, WHERE, JOB_NAME)
        metadata = {key: kept["metadata"][key] for key in ("name", "namespace", "labels")}
        others = {**metadata, "name": "others", "labels": {labels.ERASURE: ERASURE}}
        for one in (metadata, others):
            kube.put({"apiVersion": "v1", "kind": SECRET.kind, "metadata": one, "data": kept["data"]})
        await jobs.remove(ERASURE)
        assert {name for kind, where, name in kube.objects if (kind, where) == (SECRET.kind, WHERE)} == {"others"}

    async def test_begins_again_from_nothing_afterwards(self, kube: MemoryKube, jobs: Jobs) -> None:
        first = await jobs.start(order())
        await jobs.remove(ERASURE)
        assert await jobs.look(ERASURE, "shared", 1) is None
        assert (await jobs.start(order())).job != first.job


async def test_where_the_operator_serves_its_own_namespace_a_job_concerns_none_of_its_objects(
    kube: MemoryKube, jobs: Jobs
) -> None:
    await jobs.start(order())
    ends(kube, 0, WHOLE)
    store = Store(lambda: bytes(64), lambda: NOW)
    for (kind, where, _), raw in list(kube.objects.items()):
        if where == WHERE and kind in ("Pod", "NetworkPolicy"):
            assert store.observe(raw) == frozenset()
            assert store.forget(kind, where, raw["metadata"]["name"], raw) == frozenset()
    assert not store.domain(WHERE).servers


async def test_what_the_api_server_refuses_is_raised(kube: MemoryKube, jobs: Jobs) -> None:
    def refuse(verb: str, kind: str, name: str) -> None:
        raise KubeError(403, "Forbidden", f"{kind} may not be written")

    kube.before_write = refuse
    with pytest.raises(KubeError, match="Job may not be written"):
        await jobs.start(order())

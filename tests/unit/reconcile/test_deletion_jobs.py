"""Deletions as Jobs over an API server in memory: begun once whoever dies, and judged by what they printed."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvstrata.adapters.kube import KubeError
from kvstrata.adapters.resources import JOB, NETWORK_POLICY, SECRET
from kvstrata.api.cachetier import CacheTier
from kvstrata.api.reasons import InvalidationReason
from kvstrata.contract.erasereport import End, Erased, Line, Outcome, PrimaryEnd, StopReason, encode_line, totals
from kvstrata.contract.receiptfacts import Amount
from kvstrata.model.erasurefacts import JobState
from kvstrata.objects import names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.erasejob import CONTAINER, ORDER_FILE
from kvstrata.reconcile.erasures.jobreport import reason_of
from kvstrata.reconcile.erasures.jobs import REPORT_PATIENCE, Jobs
from kvstrata.reconcile.erasures.ports import DeletionJobs, DeletionRun, TierDeletion
from kvstrata.reconcile.store import Store
from kvstrata.reconcile.writer import NotLeadingError
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, redis_tier

CONTEXT = BuildContext(sidecar_image="sidecar:1", redis_image="redis:7")
WHERE = CONTEXT.operator_namespace
NOW = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
ENDED = NOW - timedelta(seconds=5)
ERASURE, KEYSPACE, NODE = "order-1", "0" * 31 + "1", "n" * 40
PASSWORD, AUTHORITY = b"the password", b"the authority"
JOB_NAME = names.deletion_job(ERASURE, "shared", 1)
SOME, NOTHING = Amount(5, 500), Amount(0, 0)

WHOLE: tuple[Line, ...] = (
    Erased(None, NODE, SOME, SOME, NOTHING),
    PrimaryEnd(NODE, 1, 1, 0),
    End(Outcome.ERASED, StopReason.NONE, "", "5" * 64, 30_000),
)


def stopped(reason: StopReason, message: str = "kvs-shared-redis:6379: it does not answer") -> tuple[Line, ...]:
    return (End(Outcome.STOPPED, reason, message, None, 0),)


def tier(**spec: Any) -> CacheTier:
    raw = redis_tier(**spec)
    return CacheTier.parse({**raw, "metadata": {**raw["metadata"], "uid": "uid-shared"}})


def order(turn: int = 1, **changes: Any) -> TierDeletion:
    return TierDeletion(
        **{
            "erasure": ERASURE, "tier": tier(), "round": turn, "domain": "00112233445566aa", "revision": 7,
            "keyspaces": (KEYSPACE,), **changes,
        }
    )  # fmt: skip


def secret(name: str, **data: bytes) -> dict[str, Any]:
    values = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": values}


@pytest.fixture
def kube() -> MemoryKube:
    found = MemoryKube()
    found.put(secret(names.redis_auth("shared"), password=PASSWORD))
    found.put(secret(names.redis_tls("shared"), ca_crt=AUTHORITY))
    return found


@pytest.fixture
def jobs(kube: MemoryKube) -> Jobs:
    return Jobs(kube, CONTEXT, lambda: NOW)


def the_job(kube: MemoryKube, name: str = JOB_NAME) -> dict[str, Any]:
    return kube.objects[(JOB.kind, WHERE, name)]


def ends(
    kube: MemoryKube, code: int, lines: tuple[Line, ...] | None, *, reason: str = "Error", log: bytes = b""
) -> None:
    """Have the Job's pod end, as the kubelet says it does."""
    finished = {"exitCode": code, "reason": reason, "finishedAt": ENDED.strftime("%Y-%m-%dT%H:%M:%SZ")}
    has_pod(kube, {"phase": "Failed" if code else "Succeeded"}, {"terminated": finished})
    if lines is not None:
        kube.logs["pod"] = log + b"".join(encode_line(line) for line in lines)


def has_pod(
    kube: MemoryKube, status: dict[str, Any], state: dict[str, Any] | None = None, owner: str | None = None
) -> None:
    """Have the Job's controller make its pod, and the kubelet say how it is."""
    job = the_job(kube)
    controller = {"apiVersion": "batch/v1", "kind": "Job", "name": JOB_NAME, "uid": owner or job["metadata"]["uid"]}
    metadata = {
        "name": "pod",
        "namespace": WHERE,
        "labels": job["spec"]["template"]["metadata"]["labels"],
        "ownerReferences": [controller],
    }
    told = {"containerStatuses": [{"name": CONTAINER, "state": state}]} if state is not None else {}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": job["spec"]["template"]["spec"]}
    kube.put({**pod, "status": {**status, **told}})


def is_over(kube: MemoryKube, kind: str, reason: str, message: str) -> None:
    """Have the Job's controller say that it is over."""
    condition = {"type": kind, "status": "True", "reason": reason, "message": message}
    kube.put({**the_job(kube), "status": {"conditions": [condition]}})


async def seen(jobs: Jobs) -> DeletionRun:
    run = await jobs.look(ERASURE, "shared", 1)
    assert run is not None
    return run


def test_it_is_what_erasures_need(jobs: Jobs) -> None:
    needed: DeletionJobs = jobs
    assert needed is jobs


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

    async def test_one_that_leads_no_more_writes_nothing(self, kube: MemoryKube) -> None:
        written = len(kube.log)
        with pytest.raises(NotLeadingError):
            await Jobs(kube, CONTEXT, lambda: NOW, lambda: False).start(order())
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


class TestAReport:
    async def test_of_a_program_that_is_whole_makes_it_done(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        ends(kube, 0, WHOLE, reason="Completed", log=b"a warning on the other stream\n")
        run = await seen(jobs)
        assert (run.state, run.ended, run.lines, run.problem) == (JobState.DONE, ENDED, WHOLE, "")
        rows = [line for line in run.lines if isinstance(line, Erased)]
        assert totals(rows, NODE) == (SOME, SOME, NOTHING)

    @pytest.mark.parametrize(
        ("stop", "reason"),
        [
            (StopReason.SERVER_AWAY, InvalidationReason.TIER_AWAY),
            (StopReason.ACCESS_REFUSED, InvalidationReason.TIER_AWAY),
            (StopReason.SLOTS_UNSERVED, InvalidationReason.TIER_AWAY),
            (StopReason.REPLICAS_BEHIND, InvalidationReason.TIER_AWAY),
            (StopReason.SLOT_MAP_CHANGED, InvalidationReason.SLOT_MAP_CHANGED),
            (StopReason.REFUSED, InvalidationReason.ERASING),
            (StopReason.NOT_EMPTIED, InvalidationReason.ERASING),
        ],
    )
    async def test_of_one_that_stopped_says_why(
        self, kube: MemoryKube, jobs: Jobs, stop: StopReason, reason: InvalidationReason
    ) -> None:
        await jobs.start(order())
        ends(kube, 3, stopped(stop))
        run = await seen(jobs)
        assert (run.state, run.ended) == (JobState.FAILED, ENDED)
        assert run.problem == f"{stop}: kvs-shared-redis:6379: it does not answer"
        assert reason_of(run) is reason

    async def test_that_is_not_there_yet_is_waited_for_and_not_for_ever(self, kube: MemoryKube) -> None:
        clock = NOW
        jobs = Jobs(kube, CONTEXT, lambda: clock)
        await jobs.start(order())
        ends(kube, 0, None)
        run = await seen(jobs)
        assert (run.state, run.ended) == (JobState.RUNNING, ENDED)
        assert "the report of pod pod cannot be read: 404 NotFound" in run.problem
        clock = ENDED + REPORT_PATIENCE
        assert (await seen(jobs)).state is JobState.FAILED
        kube.logs["pod"] = b"".join(map(encode_line, WHOLE))
        assert (await seen(jobs)).state is JobState.DONE

    @pytest.mark.parametrize(
        "log",
        [
            b"",
            b"".join(map(encode_line, WHOLE[:2])),
            encode_line(WHOLE[2])[:40],
            b"".join(map(encode_line, (*WHOLE, *WHOLE))),
            b'{"kind":"another"}\n' + encode_line(WHOLE[2]),
        ],
        ids=["empty", "no end", "cut", "two of them", "of another kind"],
    )
    async def test_that_is_not_whole_is_none(self, kube: MemoryKube, jobs: Jobs, log: bytes) -> None:
        await jobs.start(order())
        ends(kube, 0, (), log=log)
        run = await seen(jobs)
        assert (run.state, run.lines) == (JobState.RUNNING, ())
        assert "cannot be read" in run.problem

    @pytest.mark.parametrize(("code", "lines"), [(0, stopped(StopReason.SERVER_AWAY)), (3, WHOLE)])
    async def test_that_its_exit_code_contradicts_is_not_believed(
        self, kube: MemoryKube, jobs: Jobs, code: int, lines: tuple[Line, ...]
    ) -> None:
        await jobs.start(order())
        ends(kube, code, lines)
        run = await seen(jobs)
        assert (run.state, run.problem) == (
            JobState.FAILED,
            f"the program exited with {code}, and its report says otherwise",
        )

    async def test_of_a_pod_that_another_made_is_not_looked_at(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        another = await jobs.start(order(2))
        has_pod(kube, {"phase": "Succeeded"}, {"terminated": {"exitCode": 0}}, owner=another.job)
        run = await seen(jobs)
        assert (run.state, run.problem) == (JobState.RUNNING, "its pod has not been created yet")

    async def test_tells_no_keyspace(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        ends(kube, 3, stopped(StopReason.REFUSED, f"kvs-shared-redis:6379: ERR about kvs1:{KEYSPACE}"))
        assert KEYSPACE not in (await seen(jobs)).problem


class TestAJobWithoutAReport:
    @pytest.mark.parametrize(
        ("code", "reason", "problem"),
        [
            (2, "Error", "the program could not read its order: see the log of pod pod"),
            (137, "OOMKilled", "pod pod ran out of memory"),
            (1, "Error", "the program exited with 1 (Error): see the log of pod pod"),
        ],
    )
    async def test_has_failed_with_the_way_in_which_its_program_ended(
        self, kube: MemoryKube, jobs: Jobs, code: int, reason: str, problem: str
    ) -> None:
        await jobs.start(order())
        ends(kube, code, None, reason=reason)
        run = await seen(jobs)
        assert (run.state, run.problem) == (JobState.FAILED, problem)

    async def test_says_what_keeps_its_pod_from_beginning(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        has_pod(kube, {"phase": "Pending"}, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
        assert (await seen(jobs)).problem == "its pod waits: ImagePullBackOff no such image"
        nowhere = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
        has_pod(kube, {"phase": "Pending", "conditions": [nowhere]})
        assert (await seen(jobs)).problem == "its pod cannot be scheduled: 0/1 nodes are available"
        has_pod(kube, {"phase": "Running"}, {"running": {}})
        run = await seen(jobs)
        assert (run.state, run.problem) == (JobState.RUNNING, "")

    async def test_has_failed_when_its_pod_was_evicted(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        has_pod(kube, {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"})
        run = await seen(jobs)
        assert (run.state, run.problem) == (
            JobState.FAILED,
            "its pod was ended: Evicted the node was low on memory",
        )

    async def test_has_failed_when_its_time_is_over_and_its_pod_gone(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        is_over(kube, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        run = await seen(jobs)
        assert run.state is JobState.FAILED
        assert run.problem.startswith("its pod is gone, and its report with it; DeadlineExceeded")


class TestRemoval:
    async def test_takes_every_job_of_the_erasure_and_of_no_other(self, kube: MemoryKube, jobs: Jobs) -> None:
        for one in (order(), order(2), order(erasure="order-2")):
            await jobs.start(one)
        await jobs.remove(ERASURE)
        left = {name for _, where, name in kube.objects if where == WHERE}
        assert left == {names.deletion_job("order-2", "shared", 1)}, "with all that was made for them"
        await jobs.remove(ERASURE)

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

"""Deletions as Jobs over an API server in memory: judged by what their programs printed, and by how they ended."""

from __future__ import annotations

import pytest

from kvstrata.contract.messages.erase_report import Erased, Line, StopReason, encode_line, totals
from kvstrata.model.erasure.facts import JobState
from kvstrata.reconcile.erasure.jobs import REPORT_PATIENCE, Jobs
from tests.support.memory_kube import MemoryKube
from tests.unit.reconcile.deletion_jobs import (
    CONTEXT,
    ENDED,
    KEYSPACE,
    NODE,
    NOTHING,
    NOW,
    SOME,
    WHOLE,
    ends,
    has_pod,
    is_over,
    jobs_of,
    order,
    seen,
    server_of_a_tier,
    stopped,
)


@pytest.fixture
def kube() -> MemoryKube:
    return server_of_a_tier()


@pytest.fixture
def jobs(kube: MemoryKube) -> Jobs:
    return jobs_of(kube)


class TestAReport:
    async def test_of_a_program_that_is_whole_makes_it_done(self, kube: MemoryKube, jobs: Jobs) -> None:
        await jobs.start(order())
        ends(kube, 0, WHOLE, reason="Completed", log=b"a warning on the other stream\n")
        run = await seen(jobs)
        assert (run.state, run.ended, run.lines, run.problem) == (JobState.DONE, ENDED, WHOLE, "")
        rows = [line for line in run.lines if isinstance(line, Erased)]
        assert totals(rows, NODE) == (SOME, SOME, NOTHING)

    @pytest.mark.parametrize("stop", [one for one in StopReason if one is not StopReason.NONE])
    async def test_of_one_that_stopped_says_why(self, kube: MemoryKube, jobs: Jobs, stop: StopReason) -> None:
        await jobs.start(order())
        ends(kube, 3, stopped(stop))
        run = await seen(jobs)
        assert (run.state, run.ended) == (JobState.FAILED, ENDED)
        assert run.problem == f"{stop}: kvs-shared-redis:6379: it does not answer"

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
            f"the program exited with {code}, and its report contradicts that",
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
        told = (await seen(jobs)).problem
        assert told.startswith("pod pod: the image None of container delete cannot be pulled: "), told
        nowhere = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
        has_pod(kube, {"phase": "Pending", "conditions": [nowhere]})
        assert (await seen(jobs)).problem == "pod pod: it cannot be scheduled: 0/1 nodes are available"
        has_pod(kube, {"phase": "Running"}, {"running": {}})
        run = await seen(jobs)
        assert (run.state, run.problem) == (JobState.RUNNING, "")

    async def test_whose_pod_is_refused_quotes_the_api_server(self, kube: MemoryKube, jobs: Jobs) -> None:
        run = await jobs.start(order())
        about = {"involvedObject": {"uid": run.job}, "type": "Warning", "reason": "FailedCreate"}
        metadata = {"name": "event", "namespace": jobs._namespace}
        kube.put({"apiVersion": "v1", "kind": "Event", "metadata": metadata, **about, "message": "exceeded quota"})
        assert (await seen(jobs)).problem == "no pod can be created: exceeded quota"

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

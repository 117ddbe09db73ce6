"""Receipts name the digests of the images that served and erased, as the kubelet reported them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.contract.receipt.facts import Component
from kvstrata.contract.receipt.record import read_receipt
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.erasure.record import Erasure
from kvstrata.objects.erasure.delete_job import CONTAINER
from kvstrata.plan.erasure import deletions, gather
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.erasure.receipt import facts_of
from kvstrata.reconcile.erasure import record_store
from kvstrata.reconcile.parse import image_digest
from tests.support import objects
from tests.support.receipts import issue, keys
from tests.support.worlds import Simulation
from tests.unit.plan.erasures import at, deleted, order
from tests.unit.reconcile.deletion_jobs import WHOLE, jobs_of, seen, server_of_a_tier
from tests.unit.reconcile.deletion_jobs import ends as ended_job
from tests.unit.reconcile.deletion_jobs import order as job_order
from tests.unit.reconcile.test_erasure_records import record

ONE, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.mark.parametrize(
    ("reported", "digest"),
    [(f"docker.io/library/engine@{ONE}", ONE), (ONE, ONE), ("", ""), (None, ""), ("docker://local", "docker://local")],
)
def test_the_digest_is_that_of_the_kubelet(reported: str | None, digest: str) -> None:
    assert image_digest({"imageID": reported}) == digest
    assert image_digest({}) == ""


def serving(name: str, gate: str, model: str = "tiny", **status: Any) -> objects.Raw:
    raw = objects.pod(name, model)
    gates = [{"name": "gate", "state": {"running": {}}, "imageID": f"registry.example/sidecar@{gate}"}]
    return {**raw, "status": {**raw["status"], "initContainerStatuses": gates, **status}}


def test_images_of_the_pods_that_serve_at_the_beginning_are_counted_those_of_the_model_first() -> None:
    gone: dict[str, Any] = {
        "containerStatuses": [{"name": "engine", "state": {"terminated": {}}}],
        "initContainerStatuses": [],
    }
    simulation = Simulation(
        objects.cpu_tier(), objects.model(), objects.model("big"),
        serving("a", ONE), serving("b", ONE), serving("c", OTHER), serving("d", OTHER, "big"),
        serving("e", OTHER, "tiny", **gone),
    )  # fmt: skip
    simulation.settle()
    named = [one for one in gather.versions(simulation.world, "tiny") if one.name.startswith("image of ")]
    assert named == [
        Component("image of gate of CachedModel tiny", ONE, 2),
        Component("image of gate of CachedModel tiny", OTHER, 1),
        Component("image of gate of CachedModel big", OTHER, 1),
    ]


def test_images_of_jobs_are_counted_once_for_each_job_and_stay_in_the_record() -> None:
    both = (deleted("n1", job="job-1", image=ONE), deleted("n2", job="job-1", image=ONE))
    erasure = Erasure(order(versions=(Component("operator", "0.1.0", 1),))).with_facts(
        *both, deleted("n2", 40, 41, 2, job="job-2", image=OTHER), deleted("n3", job="job-0", image="")
    )
    facts = facts_of(erasure)
    assert facts.versions == (
        Component("operator", "0.1.0", 1),
        Component("image of Job of CacheTier redis", ONE, 1),
        Component("image of Job of CacheTier redis", OTHER, 1),
    )
    whole = record(*both)
    assert record_store.decode(record_store.encode(whole)) == whole
    receipt = read_receipt(issue(keys(1), None, facts))
    assert receipt.record.erasure is not None
    assert receipt.record.erasure.versions == facts.versions


async def test_a_job_reports_its_image_when_its_program_ended() -> None:
    kube = server_of_a_tier()
    jobs = jobs_of(kube)
    await jobs.start(job_order())
    ended_job(kube, 0, WHOLE)
    (pod,) = [raw for (kind, *_), raw in kube.objects.items() if kind == "Pod"]
    states = [{**one, "imageID": f"x@{ONE}"} for one in pod["status"]["containerStatuses"] if one["name"] == CONTAINER]
    kube.put({**pod, "status": {**pod["status"], "containerStatuses": states}})
    assert (await seen(jobs)).image == ONE


@pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED])
def test_a_result_has_the_image_of_its_job(state: JobState) -> None:
    begun = deleted("n" * 40, state=JobState.RUNNING, ended=None)
    run = DeletionRun("job", state, at(50), WHOLE if state is JobState.DONE else (), image=ONE)
    (result,) = deletions.over(Erasure(order()).with_facts(begun), "redis", 1, run, at(51))
    assert (result.state, result.image) == (state, ONE)

"""Deletions as Jobs in the operator's namespace: created or found, inspected, removed.

Observes: Jobs of erasures, and their pods. Writes: Jobs, each with a Secret and a NetworkPolicy that it owns.

A Job's name follows from erasure, tier and round, so it is created once. It stays suspended until its other objects
exist: a process that dies in between leaves a Job that the next one completes or deletes. Objects of others under these
names are left alone, and no deletion begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from kvstrata.api.cachetier import CacheTier
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.resources import JOB, NETWORK_POLICY, POD, SECRET, Resource
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.erasure.facts import JobState
from kvstrata.model.pods import Warned
from kvstrata.objects import labels, names
from kvstrata.objects.context import BuildContext
from kvstrata.objects.erasure import delete_job
from kvstrata.objects.erasure.delete_job import TierDeletion
from kvstrata.plan.erasure.deletions import DeletionRun
from kvstrata.plan.pod_trouble import of_events
from kvstrata.reconcile.claims import NameConflictError, require_own
from kvstrata.reconcile.erasure import job_result
from kvstrata.reconcile.events import warnings_about
from kvstrata.reconcile.secrets import decode

log = logging.getLogger(__name__)

MAX_REPORT_BYTES = 4 << 20
"""Of a container's log, with two report lines for each primary."""

REPORT_PATIENCE = timedelta(seconds=120)
"""How long to wait for the log after a pod's end: the kubelet or its connection may restart."""

RESUMES = 5
"""Attempts to resume a Job that its controller writes at the same time."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """`now` is the wall clock in UTC; `allowed` limits external servers."""

    kube: Kube
    ctx: BuildContext
    now: Callable[[], datetime]
    allowed: Callable[[], AllowedServers | None] = lambda: None

    async def start(self, order: TierDeletion) -> DeletionRun:
        """Start the Job of an order, or resume or return an existing one. Raises KubeError; LookupError, which names
        the object, if a Secret of the tier or a key in it is missing; ValueError for more keyspaces than one Job
        takes; NotLeadingError."""
        tier, name = order.tier, names.deletion_job(order.erasure, order.tier.name, order.round)
        job = await self._find(name, order.erasure)
        if job is None or _is_suspended(job):
            what, files = delete_job.deletion_order(order, self.allowed()), await self._files(tier)
            if job is None:
                job = await self._make(JOB, delete_job.build_deletion_job(self.ctx, order))
            if _is_suspended(job):
                await self._make(SECRET, delete_job.build_deletion_secret(job, what, files))
                allowed = self.allowed() or AllowedServers()
                await self._make(NETWORK_POLICY, delete_job.build_deletion_networkpolicy(job, tier, allowed))
                job = await self._resume(job)
                log.info("deletion begun", extra={"job": name, "tier": tier.name, "round": order.round})
        return await self._run(job, order.erasure)

    async def look(self, erasure: str, tier: str, round: int) -> DeletionRun | None:
        """Return a Job's state; None if there is none. Raises KubeError."""
        job = await self._find(names.deletion_job(erasure, tier, round), erasure)
        return None if job is None else await self._run(job, erasure)

    async def remove(self, erasure: str) -> None:
        """Delete every Job of an erasure, with the objects that it owns, and Secrets that lost their Job: they hold a
        tier's password. Raises KubeError and NotLeadingError."""
        for resource in (JOB, SECRET):
            async for found in self.kube.list(resource, self._namespace, f"{labels.ERASURE}={erasure}"):
                with suppress(NameConflictError):
                    require_own(resource.kind, found, {"labels": labels.of_deletion(erasure)})
                    metadata = found["metadata"]
                    await self.kube.delete(resource, self._namespace, metadata["name"], metadata["uid"])

    @property
    def _namespace(self) -> str:
        return self.ctx.operator_namespace

    async def _find(self, name: str, erasure: str) -> dict[str, Any] | None:
        job = await self.kube.get(JOB, self._namespace, name)
        if job is not None:
            require_own(JOB.kind, job, {"labels": labels.of_deletion(erasure)})
        return job

    async def _run(self, job: Mapping[str, Any], erasure: str) -> DeletionRun:
        uid = job["metadata"]["uid"]
        if _is_suspended(job):
            problem = "it has not begun: something that it needs is missing"
            return DeletionRun(uid, JobState.RUNNING, problem=problem, begun=False)
        answer, pod = job_result.over(job), await self._pod(uid, erasure)
        if pod is None:
            if answer:
                return DeletionRun(uid, JobState.FAILED, problem=f"its pod is gone, and its report with it; {answer}")
            refused = of_events(await self._warnings(uid))
            problem = job_result.readable(refused.message) if refused else "its pod has not been created yet"
            return DeletionRun(uid, JobState.RUNNING, problem=problem)
        ended = job_result.ended_of(pod)
        if ended is None:
            problem = job_result.lost(pod) or answer
            if problem:
                return DeletionRun(uid, JobState.FAILED, problem=problem)
            warnings = () if job_result.has_begun(pod) else await self._warnings(pod["metadata"]["uid"])
            return DeletionRun(uid, JobState.RUNNING, problem=job_result.held_up(pod, warnings))
        name, image = pod["metadata"]["name"], job_result.image_of(pod)
        if ended.code not in (job_result.WHOLE, job_result.STOPPED):
            return replace(job_result.crashed(uid, name, ended), image=image)
        try:
            lines = job_result.read_report(
                await self.kube.container_log(self._namespace, name, delete_job.CONTAINER, MAX_REPORT_BYTES)
            )
        except (KubeError, job_result.ReportError) as error:
            problem = job_result.readable(f"the report of pod {name} cannot be read: {error}")
            waits = self.now() < ended.at + REPORT_PATIENCE
            return DeletionRun(uid, JobState.RUNNING if waits else JobState.FAILED, ended.at, problem=problem)
        return replace(job_result.judged(uid, ended, lines), image=image)

    async def _warnings(self, about: str) -> tuple[Warned, ...]:
        try:
            return await warnings_about(self.kube, self._namespace, about)
        except KubeError:
            return ()  # they only explain

    async def _pod(self, job: str, erasure: str) -> dict[str, Any] | None:
        own = [
            pod
            async for pod in self.kube.list(POD, self._namespace, f"{labels.ERASURE}={erasure}")
            if any(owner["uid"] == job for owner in pod["metadata"].get("ownerReferences") or ())
        ]
        return max(own, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]), default=None)

    async def _files(self, tier: CacheTier) -> dict[str, bytes]:
        """Return the tier's credentials, by file name. Raises LookupError for missing ones."""
        files = {}
        for file, (secret, key) in delete_job.needed_secrets(tier).items():
            value = decode(await self.kube.get(SECRET, tier.namespace, secret) or {}).get(key)
            if value is None:
                raise LookupError(f"Secret {secret} of CacheTier {tier.name} does not exist or has no key {key}")
            files[file] = value
        return files

    async def _make(self, resource: Resource, built: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, or return the existing one of an earlier attempt. Raises NameConflictError for another."""
        try:
            return await self.kube.create(resource, self._namespace, built)
        except KubeError as error:
            if not error.is_conflict:
                raise
        found = await self.kube.get(resource, self._namespace, built["metadata"]["name"])
        if found is None:
            raise KubeError(409, "Conflict", f"{resource.kind} {built['metadata']['name']} was removed at this moment")
        require_own(resource.kind, found, built["metadata"])
        return found

    async def _resume(self, job: Mapping[str, Any]) -> dict[str, Any]:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        attempts = 0
        while True:
            found = await self.kube.get(JOB, self._namespace, name)
            if found is None or found["metadata"]["uid"] != uid:
                raise KubeError(409, "Conflict", f"Job {name} was removed at this moment")
            if not _is_suspended(found):
                return found
            begun = {**found, "spec": {**found["spec"], "suspend": False}}
            try:
                return await self.kube.replace(JOB, self._namespace, begun)
            except KubeError as error:
                attempts += 1
                if not error.is_conflict or attempts == RESUMES:
                    raise


def _is_suspended(job: Mapping[str, Any]) -> bool:
    return bool(job["spec"].get("suspend"))

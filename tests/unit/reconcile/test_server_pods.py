"""What Kubernetes says of a managed server's pod, in words that do not change with every attempt."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvstrata.plan.pod_trouble import of_status
from kvstrata.reconcile.parse import parse_server_pod
from tests.support.objects import server_pod


def container(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "redis", "image": "nginx:1", "state": state, **more}]}


NO_REDIS = "warning: x\nthis image has neither redis-server nor valkey-server\n"
ENDED = {"terminated": {"exitCode": 127, "reason": "Error", "message": NO_REDIS}}
NOT_PULLED = (
    "the image nginx:1 of container redis cannot be pulled: check its name and tag, whether nodes reach the registry, "
    "and imagePullSecrets"
)
BACKING_OFF = {"reason": "CrashLoopBackOff", "message": "back-off 20s restarting failed container=redis"}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ({}, ""),
        (container({"waiting": {"reason": "ContainerCreating"}}), ""),
        (container({"running": {}}), ""),
        (container({"running": {}}, lastState=ENDED), ""),
        (
            container({"waiting": BACKING_OFF}, lastState=ENDED),
            "container redis ends again and again, with Error, exit code 127: "
            "this image has neither redis-server nor valkey-server",
        ),
        (container(ENDED), ""),
        (
            container({"waiting": BACKING_OFF}, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "container redis ends again and again, with OOMKilled, exit code 137: see kubectl logs --previous -c "
            "redis; raise its memory limit",
        ),
        (container({"waiting": {"reason": "ErrImagePull", "message": "1"}}), NOT_PULLED),
        (container({"waiting": {"reason": "ImagePullBackOff", "message": "2"}}), NOT_PULLED),
        (
            container({"waiting": {"reason": "CreateContainerConfigError", "message": "no user"}}),
            "container redis is not started, CreateContainerConfigError: no user",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: too little memory"}]},
            "it cannot be scheduled: 0/3 nodes: too little memory",
        ),
    ],
)  # fmt: skip
def test_a_pod_says_why_it_does_not_come_up(status: dict[str, Any], told: str) -> None:
    found = of_status(status)
    assert (found.message if found is not None else "") == told


def test_a_pod_that_is_ready_has_no_trouble_whatever_it_had_before() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    _, found = parse_server_pod(server_pod("kvs-shared-redis-2-1", **container({"waiting": BACKING_OFF}), **ready))
    assert found is not None
    assert (found.shard, found.ordinal, found.ready, found.trouble) == (2, 1, True, "")


@pytest.mark.parametrize(
    ("status", "ran", "ended"),
    [
        ({}, False, False),
        (container({"waiting": BACKING_OFF}), False, False),
        (container({"waiting": BACKING_OFF}, restartCount=1), True, False),
        (container({"running": {}}), True, False),
        (container(ENDED), True, True),
    ],
)
def test_a_server_ran_and_ended_only_as_the_kubelet_reported(status: dict[str, Any], ran: bool, ended: bool) -> None:
    _, found = parse_server_pod(server_pod("kvs-shared-redis-2-1", **status))
    assert found is not None
    assert (found.ever_ran, found.ended) == (ran, ended)


@pytest.mark.parametrize("name", ["kvs-shared-redis-0", "kvs-shared-redis-x"])
def test_a_pod_of_the_tier_that_is_none_of_a_shard_is_not_known(name: str) -> None:
    assert parse_server_pod(server_pod(name)) == ("shared", None)


def test_a_pod_tells_who_made_it_and_until_when_it_had_to_end() -> None:
    raw = server_pod("kvs-shared-redis-2-1")
    _, plain = parse_server_pod(raw)
    assert plain is not None
    assert (plain.controller, plain.ends_by) == ("", None)
    owners = [{"kind": "StatefulSet", "uid": "set", "controller": True}, {"kind": "Other", "uid": "x"}]
    raw["metadata"] |= {"ownerReferences": owners, "deletionTimestamp": "2026-01-01T00:00:30Z"}
    _, going = parse_server_pod(raw)
    assert going is not None
    assert (going.controller, going.ends_by) == ("set", datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC))


def test_a_pod_tells_how_much_memory_its_server_is_started_with() -> None:
    raw = server_pod("kvs-shared-redis-2-1")
    _, unknown = parse_server_pod(raw)
    raw["spec"] = {"containers": [{"args": ["--port", "0"]}, {"args": ["--maxmemory", "1073741824", "--save", ""]}]}
    _, found = parse_server_pod(raw)
    assert unknown is not None
    assert found is not None
    assert (unknown.made_for_bytes, found.made_for_bytes) == (0, 1 << 30)

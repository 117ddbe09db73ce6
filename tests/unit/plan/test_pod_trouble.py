"""Pods that do not come up: Kubernetes' status and events become a reason and a sentence that stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.model.pods import Warned
from kvstrata.plan.pod_trouble import last_error, of_deployment, of_events, of_status, quoted, requested


def container(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "engine", "image": "reg.example/engine:1", "state": state, **more}]}


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return container({"waiting": {"reason": reason, "message": message}})


NOT_FOUND = 'rpc error: code = NotFound desc = failed to resolve reference "reg.example/engine:1": not found'
DENIED = "failed to authorize: unexpected status from GET request: 401 Unauthorized"


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (waits("ErrImagePull", NOT_FOUND), "there is no such image or tag: correct the name"),
        (
            waits("ImagePullBackOff", f"Back-off pulling image x: ErrImagePull: {NOT_FOUND}"),
            "there is no such image or tag: correct the name",
        ),
        (
            waits("ErrImagePull", DENIED),
            "the registry refuses it: correct the name, or name a Secret with credentials in imagePullSecrets",
        ),
        (
            waits("ErrImagePull", "dial tcp: lookup reg.example: no such host"),
            "the registry's host cannot be resolved: correct it",
        ),
        (
            waits("ErrImageNeverPull", "Container image is not present with pull policy of Never"),
            "the node has no such image, and imagePullPolicy is Never: load it there",
        ),
        (
            waits("ImagePullBackOff", "Back-off pulling image"),
            "check its name and tag, whether nodes reach the registry, and imagePullSecrets",
        ),
    ],
)
def test_an_image_that_is_not_pulled_is_named_with_what_to_check(status: dict[str, Any], why: str) -> None:
    found = of_status(status)
    assert found is not None
    assert found.reason == "ImageNotPulled"
    assert found.message == f"the image reg.example/engine:1 of container engine cannot be pulled: {why}"


VLLM_LOG = """usage: api_server.py [-h] [--headless] [--api-server-count API_SERVER_COUNT]
api_server.py: error: unrecognized arguments: --no-such-flag
"""


def test_an_engine_that_does_not_know_a_flag_reports_the_last_error_of_its_log() -> None:
    ended = {"terminated": {"exitCode": 2, "reason": "Error", "message": VLLM_LOG}}
    waiting = of_status(container({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended, restartCount=3))
    reported = (
        "container engine ends again and again, with Error, exit code 2: "
        "api_server.py: error: unrecognized arguments: --no-such-flag; correct engine.args of its CachedModel"
    )
    assert waiting is not None
    assert (waiting.reason, waiting.message) == ("ContainerExits", reported)
    running = container({"running": {}}, lastState=ended, restartCount=3, started=False, ready=False)
    assert of_status(running) == waiting, "between two ends the sentence stays"
    once = container({"running": {}}, lastState=ended, restartCount=1, started=False, ready=False)
    assert of_status(once) is None, "one end may be an accident"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("a\n(EngineCore pid=7) ERROR 11-27 10:00:01 [core.py:8] ValueError: too long\nbye\n", "ValueError: too long"),
        ("ValueError: the cause\nRuntimeError: Engine core failed. See root cause above.\n", "ValueError: the cause"),
        ("\x1b[0;36mstarting\x1b[0;0m\n\n", "starting"),
        ("", ""),
    ],
)
def test_the_last_error_of_a_log_has_no_time_process_or_pointer(log: str, line: str) -> None:
    assert last_error(log) == line


@pytest.mark.parametrize(
    "secret",
    ["hf_abcdefghijkl0123456789", "0123456789abcdef0123456789abcdef", "hunter2hunter2", "sk-abcdefghijkl"],
)
def test_what_may_be_a_secret_is_not_quoted(secret: str) -> None:
    for text in (
        f"error: token={secret} refused",
        f'error: {{"password": "{secret}"}}',
        f"https://{secret}@hub/x: error",
    ):
        assert secret not in quoted(text), quoted(text)
    assert len(quoted("error " * 1000)) == 300


def test_a_pod_without_room_is_named_with_what_it_asks_for() -> None:
    message = (
        "0/1 nodes are available: 1 Insufficient memory. no new claims to deallocate, preemption: 0/1 nodes are "
        "available: 1 Preemption is not helpful for scheduling."
    )
    found = of_status({"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]})
    assert found is not None
    assert (found.reason, found.message) == (
        "Unschedulable",
        "it cannot be scheduled: 0/1 nodes are available: 1 Insufficient memory",
    )
    template = {
        "spec": {
            "initContainers": [
                {"name": "cache", "restartPolicy": "Always", "resources": {"requests": {"memory": "64Gi"}}},
                {"name": "plugin", "resources": {"requests": {"memory": "1Ti"}}},
            ],
            "containers": [{"name": "engine", "resources": {"limits": {"memory": "2Gi"}}}],
        }
    }
    assert requested(template, found.message) == "a pod asks for 66Gi of memory"
    assert requested(template, "1 node(s) had untolerated taints") == ""


def mount(why: str) -> Warned:
    return Warned("FailedMount", f'MountVolume.SetUp failed for volume "hub-token" : {why}')


@pytest.mark.parametrize(
    ("events", "reason", "reported"),
    [
        (
            [mount('secret "hf" not found')],
            "SecretNotFound",
            "Secret hf of its volume hub-token does not exist: create it, or correct its name",
        ),
        (
            [mount("references non-existent secret key: token")],
            "SecretNotFound",
            "Secret hf has no key token: add it, or correct the key's name",
        ),
        (
            [mount("hostPath type check failed: /kv is no directory"), mount("timed out waiting for the condition")],
            "VolumeNotMounted",
            "its volume hub-token (Secret hf) cannot be mounted: hostPath type check failed: /kv is no directory",
        ),
        (
            [Warned("FailedCreate", 'pods "x" is forbidden: exceeded quota: small')],
            "PodsRefused",
            'no pod can be created: pods "x" is forbidden: exceeded quota: small',
        ),
    ],
)  # fmt: skip
def test_events_tell_what_the_status_of_a_pod_does_not(events: list[Warned], reason: str, reported: str) -> None:
    found = of_events(events, {"hub-token": "Secret hf"})
    assert found is not None
    assert (found.reason, found.message) == (reason, reported)
    assert of_events([Warned("Unhealthy", "Readiness probe failed")]) is None


@pytest.mark.parametrize(
    ("status", "lasting"),
    [
        (waits("ErrImagePull", NOT_FOUND), True),
        (waits("ErrImageNeverPull"), True),
        (waits("ImagePullBackOff", "Back-off pulling image"), False),
        (waits("ErrImagePull", "dial tcp: lookup reg.example: no such host"), False),
        (waits("CreateContainerConfigError", 'secret "keys" not found'), True),
        (waits("RunContainerError", "device or resource busy"), False),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "message": "1 Insufficient memory"}]}, False),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "message": '0/1 nodes are available: persistentvolumeclaim "weights" not found.',
                    }
                ]
            },
            True,
        ),
    ],
)
def test_only_a_cause_that_nothing_removes_by_itself_is_lasting(status: dict[str, Any], lasting: bool) -> None:
    found = of_status(status)
    assert found is not None
    assert found.lasting is lasting


def ended(at: int, ran_s: int) -> dict[str, Any]:
    """The last run of a container, which ended `at` seconds after an hour."""
    began, end = (f"2026-01-01T{10 + at // 3600:02}:{at // 60 % 60:02}:{at % 60:02}Z" for at in (at - ran_s, at))
    found = {"exitCode": 1, "reason": "Error", "message": "cannot reach the hub"}
    return {"terminated": {**found, "startedAt": began, "finishedAt": end}}


def lasting(state: dict[str, Any], last: dict[str, Any], count: int) -> bool | None:
    found = of_status(container(state, lastState=last, restartCount=count, started=False, ready=False))
    return found.lasting if found is not None else None


@pytest.mark.parametrize("count", [3, 50])
def test_a_container_is_not_expected_to_run_by_the_pause_before_its_start_and_not_by_its_whole_life(count: int) -> None:
    def pausing(text: str) -> dict[str, Any]:
        return {"waiting": {"reason": "CrashLoopBackOff", "message": f"back-off {text} restarting failed container=x"}}

    texts = ("10s", "1m20s", "2m40s", "5m0s")
    assert [lasting(pausing(text), ended(1800, 20), count) for text in texts] == [False, False, True, True]
    again = {"running": {"startedAt": "2026-01-01T10:32:40Z"}}
    assert lasting(again, ended(1800, 20), count), "nothing changes while it runs once more"
    assert lasting(again, ended(1950, 20), count) is False, "a short pause"


def test_the_first_end_of_an_old_container_is_no_trouble() -> None:
    again = {"running": {"startedAt": "2026-01-01T10:00:01Z"}}
    assert lasting(again, ended(0, 20), 7) is False
    assert lasting(again, ended(0, 3600), 7) is None


@pytest.mark.parametrize(
    ("refused", "lasting"),
    [
        ('pods "x" is forbidden: exceeded quota: small', True),
        ('pods "x" is forbidden: no PriorityClass with name gold was found', True),
        ('admission webhook "a.b" denied the request: no team', True),
        ('failed calling webhook "a.b": connect: connection refused', False),
        ('error looking up service account a/b: serviceaccount "b" not found', False),
    ],
)
def test_a_refusal_by_a_part_that_is_away_is_not_lasting(refused: str, lasting: bool) -> None:
    found = of_events([Warned("FailedCreate", refused)])
    assert found is not None
    assert found.lasting is lasting


def test_a_deployment_whose_pods_are_refused_reports_the_refusal() -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    found = of_deployment({"conditions": [condition]})
    assert found is not None
    assert (found.reason, found.message) == ("PodsRefused", "no pod can be created: exceeded quota")
    assert of_deployment({"conditions": [{**condition, "status": "False"}]}) is None

"""Drift: what the server added is not ours, what somebody changed is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvstrata.objects.applied import contains, difference, is_applied, part_of, stamped

DESIRED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "x", "labels": {"a": "b"}},
    "spec": {"replicas": 2, "paused": False, "containers": [{"name": "c", "args": ["--x", ""]}], "extra": None},
}


def live() -> dict[str, Any]:
    stored = copy.deepcopy(stamped(DESIRED))
    stored["metadata"] |= {"uid": "1", "resourceVersion": "5"}
    stored["spec"].pop("extra")
    stored["spec"].pop("paused")  # the server leaves out what is false
    stored["spec"]["strategy"] = {"type": "RollingUpdate"}
    stored["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
    return stored


def test_defaults_that_the_server_added_are_no_difference() -> None:
    assert is_applied(live(), stamped(DESIRED))


def test_what_is_not_there_is_not_applied() -> None:
    assert not is_applied(None, stamped(DESIRED))


def test_a_changed_field_is_noticed() -> None:
    changes: list[dict[str, Any]] = [
        {"replicas": 3},
        {"containers": []},
        {"containers": [{"name": "c", "args": ["--y", ""]}]},
    ]
    for change in changes:
        changed = live()
        changed["spec"] |= change
        assert not is_applied(changed, stamped(DESIRED)), change


def test_a_removed_label_is_noticed() -> None:
    changed = live()
    del changed["metadata"]["labels"]
    assert not is_applied(changed, stamped(DESIRED))


def test_an_item_that_somebody_added_to_a_list_is_noticed() -> None:
    changed = live()
    changed["spec"]["containers"].append({"name": "other"})
    assert not is_applied(changed, stamped(DESIRED))


TEMPLATE: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "x"},
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "image": "engine:1",
                        "args": ["--x"],
                        "env": [{"name": "A", "value": "1"}],
                        "volumeMounts": [{"mountPath": "/a", "name": "a"}, {"mountPath": "/c", "name": "a"}],
                        "ports": [{"containerPort": 80}],
                    }
                ],
                "initContainers": [{"name": "plugin"}, {"name": "gate"}],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            }
        }
    },
}


def injected(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    stored = copy.deepcopy(stamped(TEMPLATE))
    change(stored["spec"]["template"]["spec"])
    return stored


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: pod["containers"].insert(0, {"name": "proxy", "image": "mesh:1"}),
        lambda pod: pod.update(initContainers=[*pod["initContainers"], {"name": "i"}], volumes=[{"name": "v"}]),
        lambda pod: pod["containers"][0]["env"].append({"name": "B", "value": "2"}),
        lambda pod: pod["containers"][0]["volumeMounts"].insert(0, {"mountPath": "/b", "name": "b"}),
        lambda pod: pod["containers"][0]["ports"].append({"containerPort": 81}),
    ],
    ids=["a container", "init containers and volumes", "a variable", "a mount", "a port"],
)
def test_what_a_webhook_adds_to_a_pod_template_is_not_ours_to_compare(
    change: Callable[[dict[str, Any]], object],
) -> None:
    assert is_applied(injected(change), stamped(TEMPLATE))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda pod: pod["containers"][0].update(image="mirror/engine:1"), ".spec.template.spec.containers[0].image"),
        (lambda pod: pod["containers"][0]["args"].append("--y"), ".spec.template.spec.containers[0].args"),
        (
            lambda pod: pod["containers"][0]["env"][0].update(value="2"),
            ".spec.template.spec.containers[0].env[0].value",
        ),
        (lambda pod: pod["initContainers"].reverse(), ".spec.template.spec.initContainers"),
        (lambda pod: pod.update(containers=[{"name": "proxy"}]), ".spec.template.spec.containers"),
        (lambda pod: pod["tolerations"].append({"key": "x"}), ".spec.template.spec.tolerations"),
    ],
    ids=["an image", "an argument", "a value", "the order", "no engine", "a toleration"],
)
def test_what_is_changed_of_ours_is_noticed_unless_the_server_answers_every_write_so(
    change: Callable[[dict[str, Any]], object], path: str
) -> None:
    answered, wanted = injected(change), stamped(TEMPLATE)
    assert not is_applied(answered, wanted)
    assert difference(answered, wanted) == path
    rewritten = part_of(answered, wanted)
    assert is_applied(answered, wanted, rewritten)
    further = copy.deepcopy(answered)
    further["spec"]["template"]["spec"]["tolerations"] = []
    assert not is_applied(further, wanted, rewritten), "changed after the answer"
    other = stamped({**TEMPLATE, "spec": {**TEMPLATE["spec"], "paused": True}})
    assert not is_applied(answered, other, rewritten), "another write"


def test_a_field_that_is_no_longer_wanted_shows_by_the_stamp() -> None:
    wanted = copy.deepcopy(DESIRED)
    del wanted["spec"]["replicas"]
    assert contains(live(), wanted)
    assert not is_applied(live(), stamped(wanted))


def test_stamping_changes_neither_the_original_nor_other_annotations() -> None:
    before = copy.deepcopy(DESIRED)
    annotated = {**DESIRED, "metadata": {**DESIRED["metadata"], "annotations": {"mine": "1"}}}
    assert stamped(annotated)["metadata"]["annotations"]["mine"] == "1"
    stamped(DESIRED)
    assert before == DESIRED


def test_a_number_is_not_its_text() -> None:
    assert not contains({"port": "80"}, {"port": 80})

"""Drift: what the server added is not ours, what somebody changed is."""

from __future__ import annotations

import copy
from typing import Any

from kvstrata.objects.applied import contains, is_applied, stamped

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

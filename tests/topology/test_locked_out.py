"""Servers that admit no password that anybody has, because the Secret with their passwords was lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstrata.model.redis.cluster import Cluster, Goal
from kvstrata.plan.redis.topology import StepReason
from tests.topology import looks
from tests.topology.looks import step
from tests.topology.three_shards import pods, silent

pytestmark = pytest.mark.claim("servers that admit no known password are replaced one at a time")

UIDS = [f"uid-{shard}-{ordinal}" for shard in range(3) for ordinal in range(2)]
NEW = dict.fromkeys(range(3), "new")


def goal(*locked_out: str, **others: object) -> Goal:
    return looks.goal(3, **{"replicas": 1, "revisions": NEW, "locked_out": frozenset(locked_out), **others})


def refusing(*uids: str, **changed: dict[str, object]) -> Cluster:
    """A cluster some of whose servers refuse the password; its pods are ready, and of a former template."""
    found = silent(looks.cluster(looks.even(3), replicas=1), *uids)
    return pods(replace(found, silent=dict.fromkeys(uids, ("WrongPassword", "refuses the password"))), **changed)


def test_are_replaced_one_at_a_time_and_shard_by_shard() -> None:
    left, order = list(UIDS), []
    changed: dict[str, dict[str, object]] = {}
    while (found := step(refusing(*left, **changed), goal(*left))) is not None and found.remove_pod is not None:
        uid = found.remove_pod
        order.append(uid)
        assert found.reason is StepReason.REPLACING
        left.remove(uid)
        changed[uid.replace("-", "_")] = {"revision": "new", "ready": False}
        waiting = step(_without_server(refusing(*left, **changed), uid), goal(*left))
        assert waiting is not None
        assert waiting.waits
        changed[uid.replace("-", "_")] = {"revision": "new"}
        if not left:
            break
    assert order == ["uid-0-1", "uid-0-0", "uid-1-1", "uid-1-0", "uid-2-1", "uid-2-0"]


def _without_server(cluster: Cluster, uid: str) -> Cluster:
    return replace(
        cluster,
        servers={name: server for name, server in cluster.servers.items() if name != uid},
        silent={**cluster.silent, uid: ("ConnectionRefused", "nothing listens")},
    )


@pytest.mark.parametrize(
    ("pod", "replaced"),
    [
        ({"revision": "new"}, False),
        ({"revision": "new", "started": 1}, True),
        ({}, True),
    ],
)
def test_are_replaced_only_where_another_start_helps(pod: dict[str, object], replaced: bool) -> None:
    others = {uid.replace("-", "_"): {"revision": "new"} for uid in UIDS}
    found = step(refusing("uid-0-1", **{**others, "uid_0_1": pod}), goal("uid-0-1"))
    assert found is not None
    assert (found.remove_pod == "uid-0-1") is replaced


def test_one_that_only_the_look_with_the_current_password_found_refusing_is_left_to_those_who_know_the_others() -> None:
    found = step(refusing("uid-0-1"), goal())
    assert found is not None
    assert found.waits


def test_one_that_starts_anew_by_now_gets_the_chance_to_admit_somebody() -> None:
    starting = replace(refusing("uid-0-1"), silent={"uid-0-1": ("ConnectionRefused", "nothing listens")})
    found = step(starting, goal("uid-0-1"))
    assert found is not None
    assert found.waits


def test_one_that_answers_by_now_is_left_alone() -> None:
    found = step(looks.cluster(looks.even(3), replicas=1), goal("uid-0-1", revisions=dict.fromkeys(range(3), "r")))
    assert found is None


def test_what_a_primary_without_replicas_held_is_told_as_lost() -> None:
    found = silent(looks.cluster(looks.even(3)), "uid-0-0")
    refused = replace(found, silent={"uid-0-0": ("WrongPassword", "")})
    taken = step(refused, goal("uid-0-0", replicas=0))
    assert taken is not None
    assert (taken.remove_pod, taken.lost) == ("uid-0-0", looks.even(3)[0])


def test_servers_that_let_nobody_in_are_never_formed_over() -> None:
    """A server that is new beside them takes no slots while theirs may still be served."""
    fresh = looks.cluster([(), (), ()])
    locked = replace(fresh, servers={}, silent=dict.fromkeys(fresh.pods, ("WrongPassword", "")))
    found = step(locked, goal(*fresh.pods, replicas=0))
    assert found is not None
    assert found.reason is StepReason.REPLACING

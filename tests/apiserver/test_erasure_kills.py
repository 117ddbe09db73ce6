"""Somebody dies at every step of an erasure: operator, leader, gate, cache server, deletion, primary of a cluster, and
the data of a server. Resumed anywhere, it ends in the receipt of the one in which nobody died, and no condition is True
before its fact.

A real API server with real operators, gates, adapters, deletions and Redis servers. Each victim has a namespace and an
erasure of its own; all of them run beside each other, because each has to wait twice 30 s for writes to be over. Steps
are held by proxies before the API server, and none is met by timing.

The cache servers are threads of this process, so they end without a signal; without kubelets the test restarts them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.control_plane import ControlPlane
from kvstrata.cli import plugin
from kvstrata.contract.receipt.record import read_receipt
from tests.api.apiserver import ApiServer
from tests.apiserver import erasure_victims as victims
from tests.apiserver.conftest import REPOSITORY, install_crds
from tests.apiserver.erasure_observer import Observer, Sight
from tests.apiserver.erasure_steps import STEPS
from tests.apiserver.erasure_ward import Ward
from tests.apiserver.kubelet import Kubelet, wait
from tests.apiserver.operator_process import Operators
from tests.apiserver.server import Server
from tests.support.redis_binary import needs_redis
from tests.tiers.faulty_proxy import FaultyProxy
from tests.tiers.redis_cluster import PATIENT_MS, RedisCluster
from tests.tiers.redis_process import RedisProcess

pytestmark = [*needs_redis, pytest.mark.timeout(2400)]

CALM, OPERATORS, PODS, DELETIONS, SERVERS = WARDS = ("calm", "operators", "pods", "deletions", "servers")
VICTIMS = {
    "the operator": OPERATORS,
    "the leader is another": OPERATORS,
    "the gate": PODS,
    "the cache server": PODS,
    "the primary": SERVERS,
    "a server's data": SERVERS,
}
CONDITIONS = frozenset({"LogicallyInvalid", "KeysRevoked", "Erased", "Verified", "Complete"})
CLAIMS = ("Unreachable", "KeysRevoked", "Erased", "Verified")
OWN, SHARED = "kvstrata-shift", "kvstrata-system"
"""Namespaces of the operators that are killed, and of the one that serves all others."""


@dataclass(frozen=True, slots=True)
class End:
    """How the erasure of one namespace ended, and what was seen of it."""

    ward: Ward
    sight: Sight
    story: Future[victims.Died]
    receipts: list[bytes]
    defects: list[str]
    problems: list[str]

    @property
    def died(self) -> victims.Died:
        """At which steps who died."""
        return self.story.result()

    @property
    def facts(self) -> dict[str, Any]:
        """What its only receipt says, without times, boots, and names that are of this erasure alone."""
        self.story.result()
        (receipt,) = self.receipts
        claimed = read_receipt(receipt).record.claimed
        return {"claimed": sorted(claimed), **_told(json.loads(receipt)["record"]["erasure"])}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, End]]:
    """All erasures, ordered at the same time, from their orders to their ends."""
    folder = tmp_path_factory.mktemp("kills")
    with ExitStack() as stack:
        # None leaves a file to another, or to its own next life: what a killed server had is gone.
        cluster = RedisCluster(
            folder,
            primaries=3,
            replicas=1,
            options=lambda number: _without_files(f"node-{number}"),
            node_timeout_ms=PATIENT_MS,
        )
        singles = {
            name: (RedisProcess(folder, *_without_files(name)), RedisProcess(folder, *_without_files(f"{name}-open")))
            for name in WARDS
        }
        for one in (cluster, *itertools.chain(*singles.values())):
            one.start()
            stack.callback(one.kill)
        plane = stack.enter_context(ControlPlane(folder / "control-plane"))
        server = Server(plane.kubectl, plane.kubeconfig)
        install_crds(server)
        slow = FaultyProxy(singles[DELETIONS][0].port)
        stack.callback(slow.close)
        addresses = (f"127.{2 + os.getpid() % 200}.{os.getpid() // 200 % 250}.{n}" for n in itertools.count(2))
        wards = {
            name: Ward(
                plane,
                name,
                OWN if name == OPERATORS else SHARED,
                list(cluster.nodes) if name == SERVERS else [singles[name][0]],
                singles[name][1],
                partial(next, addresses),
                slow.port if name == DELETIONS else None,
            )
            for name in WARDS
        }
        api = ApiServer(plane.kubeconfig)
        stack.callback(api.close)
        (common,) = victims.proxies(stack, plane, folder / "common", 1)
        own = victims.proxies(stack, plane, folder / "own", 4)
        shifts, kubelets = {}, {}
        for namespace, proxies, served in (
            (OWN, own, [OPERATORS]),
            (SHARED, [common], [one for one in WARDS if one != OPERATORS]),
        ):
            server.kubectl("create", "namespace", namespace)
            for place in ("jobs", "logs"):
                (folder / namespace / place).mkdir(parents=True)
            kubelets[namespace] = stack.enter_context(
                Kubelet(
                    api._call, namespace, plane.pki.crt("apiserver"), plane.pki.key("apiserver"),
                    folder / namespace / "jobs", node=namespace,
                )
            )  # fmt: skip
            started = Operators(plane.kubeconfig, namespace, REPOSITORY, folder / namespace / "logs")
            served_by = victims.Shift(api, started, proxies, KVSTRATA_WATCH_NAMESPACES=",".join(served))
            shifts[namespace] = stack.enter_context(served_by)
        for ward in wards.values():
            ward.furnish()
            stack.callback(ward.close)
        stories = {
            CALM: victims.nobody,
            OPERATORS: partial(victims.operators, shift=shifts[OWN]),
            PODS: partial(victims.pods, proxy=common),
            DELETIONS: partial(victims.deletions, kubelet=kubelets[SHARED], proxy=slow),
            SERVERS: partial(victims.servers, proxy=common, cluster=cluster),
        }
        observer = stack.enter_context(Observer(plane.kubeconfig))
        for shift in shifts.values():
            shift.begin()
        sights: dict[str, Sight] = {}

        def run(name: str) -> victims.Died:
            ward = wards[name]
            ward.start_pods()
            ward.fill()
            sights[name] = observer.attend(name, ward.facts())
            died = stories[name](ward)
            ward.await_end()
            return died

        with ThreadPoolExecutor(len(WARDS)) as pool:
            ran = {name: pool.submit(run, name) for name in WARDS}
        yield {
            name: End(
                ward=ward,
                sight=sights.get(name, Sight({})),
                story=ran[name],
                receipts=[data for data, _ in ward.receipts()],
                defects=shifts[OWN if name == OPERATORS else SHARED].defects(),
                problems=observer.problems,
            )
            for name, ward in wards.items()
        }


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_victim_died_at_every_step(ends: Mapping[str, End], victim: str) -> None:
    assert ends[VICTIMS[victim]].died[victim] == STEPS


def test_the_deletion_died_at_everything_that_it_tells_a_server(ends: Mapping[str, End]) -> None:
    assert ends[DELETIONS].died == {"the deletion": frozenset(victims.DELETION_SAYS)}


@pytest.mark.parametrize("name", WARDS)
def test_it_ends_complete_with_one_receipt_that_verifies(
    ends: Mapping[str, End], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ends[name]
    end.story.result()
    assert end.ward.status["phase"] == "Complete", end.ward.status
    assert end.ward.names_with(end.ward.leaving) == []
    assert end.ward.names_with(end.ward.staying), "the neighbour keeps its own"
    (receipt,) = end.receipts
    (tmp_path / "receipt.json").write_bytes(receipt)
    (tmp_path / "key.pem").write_text(end.ward.public_key())
    needed = [word for claim in CLAIMS for word in ("--require", claim)]
    words = ["receipt", "verify", str(tmp_path / "receipt.json"), "--public-key", str(tmp_path / "key.pem"), *needed]
    assert plugin.main(words) == 0, capsys.readouterr()
    assert end.defects == []
    _, servers = end.facts["versions"]
    assert servers["count"] == 2, "tiers with servers of this version"


@pytest.mark.parametrize("name", [OPERATORS, DELETIONS])
def test_the_receipt_is_that_of_the_erasure_in_which_nobody_died(ends: Mapping[str, End], name: str) -> None:
    assert ends[name].facts == ends[CALM].facts


def test_after_a_cache_server_died_the_receipt_lacks_only_what_it_took_with_it(ends: Mapping[str, End]) -> None:
    """What was in its memory, and, if it died between the deletion of files and their count's way out, that count."""
    calm, found = ends[CALM].facts, ends[PODS].facts
    living, died = calm["pods"]
    may_be = [_sorted([living, _counts_nothing(died, lost)]) for lost in ({"CPU"}, {"CPU", "NVMe"})]
    assert found["pods"] in may_be
    assert found | {"pods": ()} == calm | {"pods": ()}


def test_after_primaries_died_the_receipt_counts_all_that_they_had_and_lacks_only_what_a_server_lost(
    ends: Mapping[str, End],
) -> None:
    expected = ends[CALM].facts
    nothing = {"keys": 0, "bytes": 0}
    expected["tiers"]["open"] |= {"found": nothing, "deleted": nothing}
    expected["tiers"]["shared"] |= {"primaries": 3}
    expected["residue"] = [one for one in expected["residue"] if one["kind"] != "FreedStorage"]
    assert ends[SERVERS].facts == expected


@pytest.mark.parametrize("name", WARDS)
def test_no_condition_is_true_before_its_fact(ends: Mapping[str, End], name: str) -> None:
    end = ends[name]
    end.story.result()
    sight = end.sight
    # The observer looks on after the end, and may be late.
    wait(
        "each fact to be seen beside its condition",
        lambda: sight.confirmed >= CONDITIONS or sight.contradictions or end.problems,
    )
    assert end.problems == []
    assert sight.contradictions == []
    assert sight.ever & sight.facts.keys() == CONDITIONS
    assert sight.otherwise >= CONDITIONS, "each fact was seen not to be so, before"
    assert sight.confirmed >= CONDITIONS, "and to be so afterwards"


def _without_files(name: str) -> tuple[str, ...]:
    return ("--repl-diskless-load", "swapdb", "--dbfilename", f"{name}.rdb")


def _told(erasure: dict[str, Any]) -> dict[str, Any]:
    subject = {name: value for name, value in erasure["subject"].items() if name != "uid"}
    pods = [
        {name: value for name, value in pod.items() if name not in ("uid", "gateBoot", "cacheBoot", "revision", "at")}
        for pod in erasure["pods"]
    ]
    keys = [(key["custody"], key["removed"]["by"], key["destroyed"]) for key in erasure["keys"]]
    return {
        "subject": subject,
        "revoked": [(one["kind"], one["name"]) for one in erasure["revoked"]],
        "models": [one["model"] for one in erasure["targets"]],
        "pods": _sorted(pods),
        "keys": keys,
        "tiers": {tier["tier"]: _tier(tier) for tier in erasure["tiers"]},
        "verifiedBy": erasure["verification"]["by"]["by"],
        "residue": erasure["residue"],
        "reached": sorted(name for name, at in erasure["timings"].items() if at),
        "versions": erasure["versions"],
    }


def _tier(tier: dict[str, Any]) -> dict[str, Any]:
    """What its primaries come to together: which they are, and who is whose replica, is not of the erasure."""
    nodes = tier["nodes"]
    return {
        "encrypted": tier["encrypted"],
        "primaries": len(nodes),
        **{
            amount: {unit: sum(node[amount][unit] for node in nodes) for unit in ("keys", "bytes")}
            for amount in ("found", "deleted", "remaining", "left")
        },
        "erasedBy": sorted({node["erased"]["by"] for node in nodes}),
        "replicasBehind": sum(node["replicas"] - node["replicasInStep"] for node in nodes),
    }


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def _counts_nothing(pod: dict[str, Any], media: Set[str]) -> dict[str, Any]:
    nothing = {"found": 0, "erased": 0, "bytes": 0}
    tiers = [{**tier, "erased": tier["erased"] | nothing} if tier["medium"] in media else tier for tier in pod["tiers"]]
    return {**pod, "tiers": tiers}

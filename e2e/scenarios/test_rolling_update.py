"""Rolling updates under load: no stream breaks, no unacknowledged pod is ready, other identities' blocks are not read.

After a rollback, the blocks that were stored in between are deleted when the rollback window is over.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

from e2e.product.caller_pod import CallerPod, Calls, caller_pod
from e2e.product.chapters import ACME_KEY, MODEL, SPARE, keyspace_of
from e2e.product.direct import container_pid, pods_run_here, scrape
from e2e.product.direct_stage import open_direct_stage
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.isolate import newcomers_cut_off_the_api_server
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.prompts import finds, shared, stored
from e2e.product.shared_tier import make_room
from e2e.product.tier_contents import TierContents, tier_contents
from e2e.product.watches import Watch, watch
from kvstrata.contract.store.redis_keys import declared, parse_block_key

pytestmark = pytest.mark.cluster

PODS = f"kvstrata.io/model={MODEL}"
ROLLED_OUT_WITHIN_S = 900
"""Two engines start one after the other beside two that serve, on a machine of two cores."""

HELD_BACK_S = 6
"""Three looks of kubelet at a pod that has everything but a policy."""

OTHER_BLOCK_TOKENS = 64
"""Another size of the engine's blocks, which makes another cache identity."""


@dataclass(frozen=True, slots=True)
class Model:
    """The demo's model, whose template can be changed."""

    kubectl: Kubectl

    @property
    def status(self) -> dict[str, Any]:
        """Its status now."""
        status: dict[str, Any] = self._read().get("status") or {}
        return status

    @property
    def args(self) -> list[str]:
        """The engine's arguments."""
        return list(self._read()["spec"]["engine"]["args"])

    def set_args(self, args: list[str]) -> None:
        """Give the engine these arguments."""
        self._patch({"engine": {"args": args}})

    def raise_generation(self) -> None:
        """Give it another identity, which reaches no block of the former one."""
        self._patch({"cacheGeneration": self._read()["spec"].get("cacheGeneration", 0) + 1})

    def keep_for_a_rollback(self, window: str | None) -> None:
        """Set how long blocks of a former identity are kept; None is the product's default."""
        self._patch({"rollbackWindow": window})

    def former(self, identity: str) -> str | None:
        """Return the phase of a former identity, None if status names none of the kind."""
        entries = self.status.get("formerIdentities") or ()
        return next((one["phase"] for one in entries if one["identity"] == identity), None)

    def wait_until_rolled_out(self) -> None:
        """Wait until every pod runs the newest template and is ready, and none is left of the one before."""
        wait_until("the model is rolled out", self._rolled_out, ROLLED_OUT_WITHIN_S, every_s=1)

    def _patch(self, spec: dict[str, Any]) -> None:
        patch = json.dumps({"spec": spec})
        self.kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachedmodel", MODEL, "--type", "merge", "-p", patch)

    def _rolled_out(self) -> bool:
        read = self._read()
        status = read.get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        current = status.get("observedGeneration") == read["metadata"]["generation"]
        settled = current and conditions.get("RolledOut") == conditions.get("Ready") == "True"
        return bool(settled and len(self.kubectl.list("pod", DEMO_NAMESPACE, PODS)) == status["replicas"])

    def _read(self) -> dict[str, Any]:
        return self.kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)


@pytest.fixture
def model(kubectl: Kubectl) -> Model:
    """The demo's model, with everything at rest."""
    if not pods_run_here():
        pytest.skip("holds new pods back on their node and looks into their networks: only on the local cluster")
    wait_until("everything is at rest", lambda: not unsettled(kubectl), ROLLED_OUT_WITHIN_S)
    return Model(kubectl)


@pytest.fixture
def other_args(model: Model) -> Iterator[list[str]]:
    """Arguments of the engine by which the model has another identity; it gets its own back in the end."""
    own = model.args
    yield _with_block_size(own, OTHER_BLOCK_TOKENS)
    model.keep_for_a_rollback(None)
    model.set_args(own)
    model.wait_until_rolled_out()


@pytest.mark.claim(
    "an update breaks no stream, no pod is ready unacknowledged, and the new model never reads old blocks"
)
def test_an_update_breaks_no_stream_and_leaves_the_former_identitys_blocks_unread(
    kubectl: Kubectl, model: Model
) -> None:
    identity, prompts = model.status["identity"], _shared(kubectl)
    with _load(kubectl) as load:
        before = _names(kubectl)
        with newcomers_cut_off_the_api_server(_addresses(kubectl)):
            model.raise_generation()
            _a_pod_without_a_policy_is_not_ready(kubectl, load.pods, before)
        model.wait_until_rolled_out()
        load.each_pod_had_acknowledged_when_it_became_ready(before)
    load.broke_nothing()
    assert model.status["identity"] != identity
    with open_direct_stage(kubectl, print) as new:
        # Each prompt is asked once: it is cached in the new identity from then on.
        for prompt, where in zip(prompts, (new.first, new.second), strict=True):
            assert where.found(ACME_KEY, prompt) == 0, f"{where.pod} reads blocks of another identity"
        shared(new.first, new.second, ACME_KEY)


def test_a_rollback_breaks_no_stream_finds_its_blocks_again_and_deletes_those_stored_in_between(
    kubectl: Kubectl, model: Model, other_args: list[str]
) -> None:
    own, identity, prompts = model.args, model.status["identity"], _stored(kubectl)
    model.set_args(other_args)
    model.wait_until_rolled_out()
    other = model.status["identity"]
    assert other != identity
    _shared(kubectl)
    with _load(kubectl) as load:
        before = _names(kubectl)
        model.set_args(own)
        model.wait_until_rolled_out()
        load.each_pod_had_acknowledged_when_it_became_ready(before)
    load.broke_nothing()
    assert model.status["identity"] == identity
    with open_direct_stage(kubectl, print) as back:
        finds(back.second, ACME_KEY, prompts)
    _an_abandoned_identity_is_deleted(kubectl, model, other, identity)


@dataclass(slots=True)
class Load:
    """Requests by the Service, and what happens to the model's pods meanwhile."""

    kubectl: Kubectl
    caller: CallerPod
    pods: Watch
    clock_ahead_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    calls: Calls = field(default_factory=lambda: Calls([]))

    def each_pod_had_acknowledged_when_it_became_ready(self, before: frozenset[str]) -> None:
        """By the times in the gates' own logs and the API server's events; both are of this machine's clock."""
        new = _names(self.kubectl) - before
        assert len(new) == 2, new
        for name in new:
            ready = next(seen for seen in self.pods.history if seen.name == name and _is_ready(seen.object))
            log = self.kubectl.run("-n", DEMO_NAMESPACE, "logs", name, "-c", "gate", "--tail=-1")
            line = next(line for line in log.splitlines() if "a policy revision is acknowledged" in line)
            acked = datetime.fromisoformat(json.loads(line)["time"]).timestamp() - self.clock_ahead_s
            assert acked < ready.at, f"{name} was ready {acked - ready.at:.1f} s before"

    def broke_nothing(self) -> None:
        """Every request was answered to its end, and streams ran when pods were asked to go."""
        print(self.calls)
        assert not self.calls.broken, str(self.calls)
        leaving = {s.name: s.at + self.clock_ahead_s for s in reversed(self.pods.history) if _is_leaving(s.object)}
        assert len(leaving) == 2, f"two pods were to be replaced: {sorted(leaving)}"
        streams = self.calls.streams
        crossed = [one for one in streams if any(one.began < at < one.ended for at in leaving.values())]
        assert crossed, "no stream ran when a pod was asked to go"


@contextmanager
def _load(kubectl: Kubectl) -> Iterator[Load]:
    """Let streams and plain requests run while the block runs."""
    with (
        caller_pod(kubectl, DEMO_NAMESPACE, MODEL, ACME_KEY, streams=1, plain=1) as caller,
        watch(kubectl, "pod", DEMO_NAMESPACE, "-l", PODS) as pods,
    ):
        load = Load(kubectl, caller, pods)
        yield load
        load.calls = caller.calls()


def _a_pod_without_a_policy_is_not_ready(kubectl: Kubectl, pods: Watch, before: frozenset[str]) -> None:
    """The first new pod cannot read its bundle: its engine serves, its gate reports the reason, and it is not ready."""
    started = pods.wait_for("a new engine runs", lambda pod: _is_new(pod, before) and _engine_runs(pod))
    pid = container_pid(kubectl, DEMO_NAMESPACE, started.name, "gate")
    until = time.monotonic() + HELD_BACK_S
    while time.monotonic() < until:
        answer = scrape(pid, 8081, "/readyz")
        assert "no policy" in answer, answer
        time.sleep(0.5)
    ready = [seen for seen in pods.history if _is_new(seen.object, before) and _is_ready(seen.object)]
    assert not ready, f"{ready[0].name} is ready, and has never read a policy"


def _an_abandoned_identity_is_deleted(kubectl: Kubectl, model: Model, unwanted: str, wanted: str) -> None:
    """Its blocks are in the shared tier until the window is over; then a Job takes them, and no others."""
    with tier_contents(kubectl) as redis:
        keyspace = keyspace_of(kubectl, "acme")
        wait_until("it is former", lambda: model.former(unwanted) == "Kept")
        before = _blocks_by_identity(redis, keyspace)
        assert before[unwanted]
        assert before[wanted]
        model.keep_for_a_rollback("0s")
        wait_until("it is reclaimed", lambda: model.former(unwanted) is None)
        after = _blocks_by_identity(redis, keyspace)
    assert model.status["reclaimed"]["blocks"] > 0
    assert after[unwanted] == 0
    assert after[wanted] >= before[wanted], "blocks of the identity in use were deleted"


def _blocks_by_identity(redis: TierContents, keyspace: str) -> Counter[str]:
    keys = (parse_block_key(block.name) for block in redis.blocks(keyspace))
    return Counter(declared(key.identity) for key in keys if key is not None)


def _with_block_size(args: list[str], tokens: int) -> list[str]:
    place = args.index("--block-size") + 1
    assert args[place] != str(tokens)
    return [*args[:place], str(tokens), *args[place + 1 :]]


def _shared(kubectl: Kubectl) -> list[str]:
    """Return a prompt of acme for each pod that one replica stored and the other found in the shared tier."""
    with open_direct_stage(kubectl, print) as stage:
        make_room(stage)
        return shared(stage.first, stage.second, ACME_KEY, 2)


def _stored(kubectl: Kubectl) -> list[str]:
    """Return prompts of acme that one replica stored, of which one is to be found."""
    with open_direct_stage(kubectl, print) as stage:
        make_room(stage)
        return stored(stage.first, ACME_KEY, SPARE)


def _names(kubectl: Kubectl) -> frozenset[str]:
    return frozenset(pod["metadata"]["name"] for pod in kubectl.list("pod", DEMO_NAMESPACE, PODS))


def _addresses(kubectl: Kubectl) -> frozenset[str]:
    pods = json.loads(kubectl.run("get", "pod", "--all-namespaces", "-o", "json"))["items"]
    return frozenset(pod["status"]["podIP"] for pod in pods if pod["status"].get("podIP"))


def _is_new(pod: dict[str, Any], before: frozenset[str]) -> bool:
    return pod["metadata"]["name"] not in before


def _is_leaving(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _engine_runs(pod: dict[str, Any]) -> bool:
    """Whether the engine's startup probe has passed."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(one["name"] == "engine" and one.get("started") for one in statuses)

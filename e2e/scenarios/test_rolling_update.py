"""A rolling update under load: no broken stream, no unacknowledged pod ever ready, the old identity out of reach.

Then it is rolled back, and blocks that were stored in between are deleted when the rollback window is over.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from e2e.product.caller_pod import Calls, caller_pod
from e2e.product.chapters import (
    ACME_KEY,
    MODEL,
    STORE_SETTLES_S,
    WHOLE_CHUNKS,
    Stage,
    fresh_prompt,
    keyspace_of,
    open_stage,
)
from e2e.product.direct import DirectReplica, container_pid, pods_run_here, scrape
from e2e.product.direct_stage import open_direct_stage
from e2e.product.install import DEMO_NAMESPACE, unsettled
from e2e.product.isolate import newcomers_cut_off_the_api_server
from e2e.product.kubectl import Kubectl, wait_until
from e2e.product.shared_tier import make_room
from e2e.product.tier_contents import TierContents, tier_contents
from e2e.product.watches import Watch, watch
from kvstrata.contract.store.redis_keys import parse_block_key

pytestmark = pytest.mark.cluster

PODS = f"kvstrata.io/model={MODEL}"
ROLLED_OUT_WITHIN_S = 600
"""Two engines start one after the other beside two that serve, on a machine of two cores."""

RECLAIMED_WITHIN_S = 240

HELD_BACK_S = 6
"""Three looks of kubelet at a pod that has everything but a policy."""

OTHER_BLOCK_TOKENS = 64
"""Another size of the engine's blocks, which makes another cache identity."""

PROMPTS = 3
"""A lookup that is late on a busy machine is a miss by design, so one prompt alone proves nothing."""


@dataclass(frozen=True, slots=True)
class Model:
    """The demo's model, whose engine can be given other arguments."""

    kubectl: Kubectl
    args: tuple[str, ...]

    @property
    def status(self) -> dict[str, Any]:
        """Its status now."""
        status: dict[str, Any] = self._read().get("status") or {}
        return status

    def change(self, args: tuple[str, ...]) -> None:
        """Give the engine these arguments."""
        self._patch({"engine": {"args": list(args)}})

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
def model(kubectl: Kubectl) -> Iterator[Model]:
    """The demo's model, which gets its own arguments back in the end."""
    if not pods_run_here():
        pytest.skip("holds new pods back on their node and looks into their networks: only on the local cluster")
    wait_until("everything is at rest", lambda: not unsettled(kubectl), ROLLED_OUT_WITHIN_S)
    found = kubectl.get("cachedmodel", MODEL, DEMO_NAMESPACE)
    model = Model(kubectl, tuple(found["spec"]["engine"]["args"]))
    yield model
    model.keep_for_a_rollback(None)
    model.change(model.args)
    model.wait_until_rolled_out()


def test_an_update_and_its_rollback_break_no_stream_and_keep_each_identity_to_itself(
    kubectl: Kubectl, model: Model
) -> None:
    identity = model.status["identity"]
    with open_stage(kubectl, print) as old:
        make_room(old)
    with open_direct_stage(kubectl, print) as old:
        prompts = [_shared(old) for _ in range(PROMPTS)]
    with (
        caller_pod(kubectl, DEMO_NAMESPACE, MODEL, ACME_KEY, streams=1, plain=1) as caller,
        watch(kubectl, "pod", DEMO_NAMESPACE, "-l", PODS) as pods,
    ):
        clock_ahead_s = time.time() - time.monotonic()
        before = _names(kubectl)
        with newcomers_cut_off_the_api_server(_addresses(kubectl)):
            model.change(_with_block_size(model.args, OTHER_BLOCK_TOKENS))
            _a_pod_without_a_policy_is_not_ready(kubectl, pods, before)
        model.wait_until_rolled_out()
        other = model.status["identity"]
        assert other != identity
        _every_pod_had_acknowledged_when_it_became_ready(kubectl, pods, before, clock_ahead_s)

        with open_direct_stage(kubectl, print) as new:
            # Each prompt is asked once: it is cached in the new identity from then on.
            for prompt, where in zip(prompts, (new.first, new.second, new.first), strict=True):
                assert _found(where, prompt) == 0, f"{where.pod} reads blocks of another identity"
            _shared(new)

        before = _names(kubectl)
        model.change(model.args)
        model.wait_until_rolled_out()
        assert model.status["identity"] == identity
        _every_pod_had_acknowledged_when_it_became_ready(kubectl, pods, before, clock_ahead_s)
        with open_direct_stage(kubectl, print) as back:
            found = [_found(where, prompt) for prompt in prompts for where in (back.first, back.second)]
        assert WHOLE_CHUNKS in found, f"after the rollback nothing of the old identity is found: {found}"
        _an_abandoned_identity_is_deleted(kubectl, model, other, identity)
        calls = caller.calls()
    _nothing_broke(calls, pods, clock_ahead_s)
    print(f"update and rollback: {calls}; found after the rollback: {found}")


def _a_pod_without_a_policy_is_not_ready(kubectl: Kubectl, pods: Watch, before: frozenset[str]) -> None:
    """The first new pod cannot read its bundle: its engine serves, its gate reports the reason, and it is not ready."""
    started = pods.wait_for(
        "a new engine runs", lambda pod: _is_new(pod, before) and _engine_runs(pod), ROLLED_OUT_WITHIN_S
    )
    pid = container_pid(kubectl, DEMO_NAMESPACE, started.name, "gate")
    until = time.monotonic() + HELD_BACK_S
    while time.monotonic() < until:
        answer = scrape(pid, 8081, "/readyz")
        assert "no policy" in answer, answer
        time.sleep(0.5)
    ready = [seen for seen in pods.history if _is_new(seen.object, before) and _is_ready(seen.object)]
    assert not ready, f"{ready[0].name} is ready, and has never read a policy"


def _every_pod_had_acknowledged_when_it_became_ready(
    kubectl: Kubectl, pods: Watch, before: frozenset[str], clock_ahead_s: float
) -> None:
    """By the gates' own logs and the order of the API server's events; both are dated by this machine's clock."""
    new = _names(kubectl) - before
    assert len(new) == 2, new
    for name in new:
        ready = next(seen for seen in pods.history if seen.name == name and _is_ready(seen.object))
        log = kubectl.run("-n", DEMO_NAMESPACE, "logs", name, "-c", "gate", "--timestamps", "--tail=-1")
        line = next(line for line in log.splitlines() if "a policy revision is acknowledged" in line)
        acked = datetime.fromisoformat(line.split(" ", 1)[0]).timestamp()
        assert acked < ready.at + clock_ahead_s, f"{name} was ready {acked - ready.at - clock_ahead_s:.1f} s before"


def _an_abandoned_identity_is_deleted(kubectl: Kubectl, model: Model, unwanted: str, wanted: str) -> None:
    """Its blocks are in the shared tier until the window is over; then a Job takes them, and no others."""
    with tier_contents(kubectl) as redis:
        keyspace = keyspace_of(kubectl, "acme")
        wait_until("it is former", lambda: model.former(unwanted) == "Kept", RECLAIMED_WITHIN_S)
        before = _blocks_by_identity(redis, keyspace)
        assert before[unwanted]
        assert before[wanted]
        model.keep_for_a_rollback("0s")
        wait_until("it is reclaimed", lambda: model.former(unwanted) is None, RECLAIMED_WITHIN_S)
        after = _blocks_by_identity(redis, keyspace)
    reclaimed = model.status["reclaimed"]
    assert reclaimed["identity"] == unwanted
    assert reclaimed["blocks"] > 0
    assert after[unwanted] == 0
    assert after[wanted] >= before[wanted], "blocks of the identity in use were deleted"


def _blocks_by_identity(redis: TierContents, keyspace: str) -> Counter[str]:
    keys = (parse_block_key(block.name) for block in redis.blocks(keyspace))
    return Counter(key.identity for key in keys if key is not None)


def _nothing_broke(calls: Calls, pods: Watch, clock_ahead_s: float) -> None:
    """Every request was answered to its end, and streams ran when pods were asked to go."""
    assert not calls.broken, str(calls)
    leaving = {seen.name: seen.at + clock_ahead_s for seen in reversed(pods.history) if _is_leaving(seen.object)}
    assert len(leaving) == 4, f"four pods were to be replaced: {sorted(leaving)}"
    crossed = [one for one in calls.streams if any(one.began < at < one.ended for at in leaving.values())]
    assert crossed, "no stream ran when a pod was asked to go"


def _with_block_size(args: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    place = args.index("--block-size") + 1
    assert args[place] != str(tokens)
    return (*args[:place], str(tokens), *args[place + 1 :])


def _shared(stage: Stage) -> str:
    """Return a prompt of acme that one replica stored and the other found in the shared tier."""
    for _ in range(5):
        prompt = fresh_prompt("identity")
        assert _found(stage.first, prompt) == 0
        time.sleep(STORE_SETTLES_S)
        if _found(stage.second, prompt) == WHOLE_CHUNKS:
            return prompt
    raise AssertionError("of 5 prompts none was found on the other replica")


def _found(where: Any, prompt: str) -> int:
    assert isinstance(where, DirectReplica)
    answer = where.complete(ACME_KEY, prompt)
    assert answer.status == 200, f"{where.pod} answered {answer.status}: {answer.body}"
    return answer.cached_tokens


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

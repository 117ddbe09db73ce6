"""What a CacheTier says of its server, and of what it does not do."""

from __future__ import annotations

import base64
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.pods import BackendAccess
from kvstrata.model.refs import Key
from kvstrata.objects import labels, names
from kvstrata.plan.actions import ProbeBackend
from kvstrata.plan.redis.passwords import OVERLAP_S, SETTLE_S
from kvstrata.reconcile.secrets import decode
from tests.support.memory_secret_store import CERTIFICATE_LIFE
from tests.support.objects import NAMESPACE, STALLED_REDIS, cpu_tier, model, older_tier, pod, redis_tier
from tests.support.worlds import Simulation, finish


def at_rest(*objects: Any) -> Simulation:
    simulation = Simulation(*objects)
    simulation.come_to_rest()
    return simulation


def external(endpoint: str, **spec: Any) -> dict[str, Any]:
    return {"external": {"endpoints": [endpoint], **spec}}


@pytest.mark.parametrize("change", [external("other:6379"), external("one:6379", username="someone")])
def test_an_answer_of_the_server_before_says_nothing_of_the_one_that_spec_names_now(change: Any) -> None:
    simulation = at_rest(redis_tier(redis=external("one:6379")))
    assert simulation.condition("CacheTier", "shared", "BackendReachable")[0] == "True"
    assert simulation.asked[-1] == "one:6379"
    count = len(simulation.asked)
    simulation.edit("CacheTier", "shared", redis=change)
    made = simulation.step(Key("CacheTier", NAMESPACE, "shared"))
    assert simulation.condition("CacheTier", "shared", "BackendReachable") == ("Unknown", "Progressing")
    assert "used" not in simulation.status("CacheTier", "shared")
    asked = [action.access.endpoint for action in made.actions if isinstance(action, ProbeBackend)]
    assert asked == [change["external"]["endpoints"][0]]
    simulation.settle()
    assert simulation.condition("CacheTier", "shared", "BackendReachable")[0] == "True"
    assert simulation.asked[count:] == change["external"]["endpoints"]


def test_a_change_that_keeps_the_server_keeps_its_answer() -> None:
    simulation = at_rest(redis_tier(redis=external("one:6379")))
    simulation.edit("CacheTier", "shared", capacity="128Mi")
    simulation.step(Key("CacheTier", NAMESPACE, "shared"))
    assert simulation.condition("CacheTier", "shared", "Ready")[0] == "True"


def test_a_tier_that_is_stalled_does_not_claim_what_nobody_asks_about() -> None:
    simulation = at_rest(older_tier(), redis_tier())
    before = simulation.status("CacheTier", "shared")
    assert before["shardsReady"] == 1
    assert before["used"] == "0"
    simulation.edit("CacheTier", "shared", redis=STALLED_REDIS)
    simulation.come_to_rest()
    after = simulation.status("CacheTier", "shared")
    assert "shardsReady" not in after
    assert "used" not in after


def test_a_password_that_is_no_text_is_told_with_its_secret() -> None:
    simulation = at_rest(redis_tier(redis=external("one:6379", authSecretRef={"name": "login"})))
    data = {"password": base64.b64encode(b"\xff\xfe").decode()}
    metadata = {"name": "login", "namespace": NAMESPACE}
    simulation.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    order = ProbeBackend("shared", BackendAccess("one:6379", "one", None, ("login", "password")), "demo")
    finish(simulation.backends.ask(NAMESPACE, order))
    report = simulation.world.backends["shared"]
    assert (report.reachable, report.reason) == (False, "SecretUnreadable")
    assert report.message == "the key password of Secret login is not UTF-8 text"


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (redis_tier("t", maxRetention="1h"), ("", "")),
        (cpu_tier("t", maxRetention="1h"), ("Unknown", "BudgetsNotEnforced")),
        (cpu_tier("t"), ("", "")),
    ],
)
def test_retention_is_judged_where_pods_have_to_keep_it(tier: Any, expected: tuple[str, str]) -> None:
    simulation = at_rest(tier, model(tiers=("t",)), pod("pod-0"))
    simulation.ack("pod-0", tiers=())
    simulation.settle()
    assert simulation.condition("CacheTier", "t", "RetentionKept") == expected
    simulation.delete("Pod", "pod-0")
    simulation.come_to_rest()
    assert simulation.condition("CacheTier", "t", "RetentionKept") == ("", "")


def said(simulation: Simulation, **figures: Any) -> None:
    """Have the tier's server answer the operator with these figures."""
    backends = simulation.store.domain(NAMESPACE).backends
    backends["shared"] = replace(backends["shared"], **figures)
    simulation.queue.add(Key("CacheTier", NAMESPACE, "shared"))
    simulation.settle()


@pytest.mark.parametrize(
    ("figures", "refused", "expected"),
    [
        ({"used_bytes": 50, "max_bytes": 100}, False, ("True", "RoomLeft")),
        ({"used_bytes": 100, "max_bytes": 100}, False, ("False", "OutOfMemory")),
        ({"used_bytes": 95, "max_bytes": 100}, False, ("True", "RoomLeft")),
        ({"used_bytes": 95, "max_bytes": 100}, True, ("False", "OutOfMemory")),
        ({"used_bytes": 20, "max_bytes": 100}, True, ("True", "RoomLeft")),
        ({"used_bytes": 100, "max_bytes": 100, "evicts": True}, False, ("True", "RoomLeft")),
        ({"used_bytes": 100, "max_bytes": 0}, False, ("True", "RoomLeft")),
        ({"version": "", "max_bytes": 0}, True, ("False", "OutOfMemory")),
        ({"version": "", "max_bytes": 0}, False, ("True", "RoomLeft")),
        ({"reachable": False, "reason": "Timeout", "used_bytes": 100, "max_bytes": 100}, True, ("Unknown", "Timeout")),
    ],
)
def test_a_tier_says_whether_its_server_takes_new_blocks(
    figures: dict[str, Any], refused: bool, expected: tuple[str, str]
) -> None:
    simulation = at_rest(redis_tier(), model(tiers=("shared",)), pod("pod-0"))
    simulation.ack("pod-0", tiers=(TierState("shared", "Redis", "closed", full=refused),))
    said(simulation, **figures)
    assert simulation.condition("CacheTier", "shared", "HasRoom") == expected


def test_a_full_tier_is_in_use_and_its_ready_condition_names_what_it_lacks() -> None:
    simulation = at_rest(redis_tier())
    said(simulation, used_bytes=101, max_bytes=100)
    assert simulation.condition("CacheTier", "shared", "BackendReachable")[0] == "True"
    assert simulation.condition("CacheTier", "shared", "Ready") == ("True", "OutOfMemory")
    said(simulation, used_bytes=40)
    assert simulation.condition("CacheTier", "shared", "Ready") == ("True", "TierReady")


def test_a_server_that_a_pod_lost_is_asked_at_once() -> None:
    simulation = at_rest(redis_tier(redis=external("one:6379")), model(tiers=("shared",)), pod("pod-0"))
    key = Key("CacheTier", NAMESPACE, "shared")
    simulation.now += timedelta(seconds=5)
    assert not simulation.step(key).actions
    simulation.ack("pod-0", tiers=(TierState("shared", "Redis", "open"),))
    assert [type(action) for action in simulation.step(key).actions] == [ProbeBackend]


class TestCredentials:
    """Of a managed tier with one shard, in a whole operator."""

    SECRET, SERVER = (
        ("Secret", NAMESPACE, names.redis_auth("shared")),
        ("StatefulSet", NAMESPACE, names.redis_shard("shared", 0)),
    )

    def passwords(self, simulation: Simulation) -> dict[str, bytes]:
        values = decode(simulation.kube.objects[self.SECRET])
        return {key: value for key, value in values.items() if key.endswith("password")}

    def test_are_current_when_the_server_has_them(self) -> None:
        simulation = at_rest(redis_tier())
        assert simulation.condition("CacheTier", "shared", "PasswordsCurrent") == ("True", "PasswordsSet")
        assert simulation.condition("CacheTier", "shared", "CertificateCurrent") == ("True", "CertificateShown")

    def test_passwords_that_are_asked_for_come_into_use_and_the_server_goes_on(self) -> None:
        simulation = at_rest(redis_tier())
        before, template = self.passwords(simulation), simulation.kube.objects[self.SERVER]["spec"]["template"]
        raw = dict(simulation.kube.objects[("CacheTier", NAMESPACE, "shared")])
        asked = {**raw["metadata"], "annotations": {labels.ROTATE_PASSWORDS: "2026-01"}}
        simulation.put({**raw, "metadata": asked})
        simulation.settle()
        assert simulation.condition("CacheTier", "shared", "PasswordsCurrent") == ("False", "RotatingPasswords")
        simulation.advance(SETTLE_S + 30)
        assert simulation.condition("CacheTier", "shared", "PasswordsCurrent") == ("True", "PasswordsOverlap")
        simulation.advance(OVERLAP_S + 30)
        assert simulation.condition("CacheTier", "shared", "PasswordsCurrent") == ("True", "PasswordsSet")
        after = self.passwords(simulation)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert simulation.kube.objects[self.SERVER]["spec"]["template"] == template
        writes = simulation.kube.writes
        simulation.restart()
        simulation.advance(OVERLAP_S)
        assert simulation.kube.writes == writes

    def test_a_certificate_that_is_renewed_does_not_start_the_server_anew(self) -> None:
        simulation = at_rest(redis_tier())
        template = simulation.kube.objects[self.SERVER]["spec"]["template"]
        simulation.advance(CERTIFICATE_LIFE.total_seconds() + 60)
        simulation.come_to_rest()
        tls = decode(simulation.kube.objects[("Secret", NAMESPACE, names.redis_tls("shared"))])
        (server,) = simulation.servers.values()
        assert server.certificate == digest_bytes(tls[names.CERTIFICATE_KEY])
        assert simulation.kube.objects[self.SERVER]["spec"]["template"] == template

    def test_passwords_that_were_lost_are_drawn_anew_and_the_server_is_replaced(self) -> None:
        simulation = at_rest(redis_tier())
        before, template = self.passwords(simulation), simulation.kube.objects[self.SERVER]["spec"]["template"]
        simulation.advance(60)
        simulation.delete("Secret", names.redis_auth("shared"))
        simulation.come_to_rest()
        assert not set(self.passwords(simulation).values()) & set(before.values())
        assert simulation.kube.objects[self.SERVER]["spec"]["template"] != template
        assert simulation.unsettled() == {}

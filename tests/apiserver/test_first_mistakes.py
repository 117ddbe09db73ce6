"""First mistakes that only the API server can answer: a namespace that no operator serves, engine flags that an
installation does not allow, and events about pods."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from kvstrata.clients.kube import Kube
from kvstrata.model.pods import Warned
from kvstrata.reconcile.events import warnings_about
from tests.apiserver.server import Server
from tests.golden.chart.rendering import OPERATOR_CHART, REPOSITORY, render
from tests.support.objects import cpu_tier, model

SERVED, UNSERVED = "first-served", "first-unserved"
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def warned(server: Server) -> Iterator[Server]:
    """An API server with the chart's warning of unserved namespaces, of a release that serves one."""
    for name in (SERVED, UNSERVED):
        server.kubectl("create", "namespace", name)
    rendered = render(OPERATOR_CHART, {"watchNamespaces": [SERVED]})
    policies = [built for (kind, _), built in rendered.items() if kind.startswith("ValidatingAdmissionPolicy")]
    assert len(policies) == 2
    for built in policies:
        server.apply(built)
    yield server
    for built in policies:
        server.kubectl("delete", built["kind"], built["metadata"]["name"])
    for name in (SERVED, UNSERVED):
        server.kubectl("delete", "namespace", name, "--wait=false")


def apply_in(server: Server, namespace: str, obj: Mapping[str, Any]) -> str:
    """Apply an object in another namespace, as its user; return the API server's warnings."""
    moved = {**obj, "metadata": {**obj["metadata"], "namespace": namespace}}
    done = subprocess.run(
        [str(server.kubectl_path), f"--kubeconfig={server.kubeconfig}", "apply", "-f", "-"],
        input=json.dumps(moved), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stderr


def test_a_namespace_that_is_not_served_is_answered_with_the_command_that_adds_it(warned: Server) -> None:
    deadline = time.monotonic() + PATIENCE_S
    answer = ""
    while not answer:  # the API server reads a new policy within a second or so
        assert time.monotonic() < deadline, "no warning came"
        answer = apply_in(warned, UNSERVED, cpu_tier(f"tier-{time.monotonic_ns()}"))
    assert f"release kvstrata does not serve namespace {UNSERVED}" in answer
    command = (
        "helm upgrade kvstrata charts/kvstrata -n kvstrata-system --reuse-values "
        f"--set 'watchNamespaces={{{SERVED},{UNSERVED}}}'"
    )
    assert command in answer
    assert apply_in(warned, SERVED, cpu_tier()) == ""


def test_the_policy_of_the_security_guide_admits_the_listed_engine_flags_and_no_others(warned: Server) -> None:
    page = (REPOSITORY / "docs/concepts/security.md").read_text()
    policies = list(yaml.safe_load_all(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]))
    registry, allowed = "registry.example.com", ["--max-num-seqs", "4", "--max_num_seqs=4", "--enforce-eager"]
    with_flag = {"image": f"{registry}/engine:1", "args": ["--quantization=fp8"]}
    apply_in(warned, SERVED, model("before", engine=with_flag))
    for built in policies:
        warned.apply(built)
    try:
        refused = "engine.args has flags that are not allowed here: --quantization=fp8"
        warned.wait("the policy", lambda: refused in refusal(warned, model("with-flag", engine=with_flag)))
        for args in (["--max-num-seq=4"], ["--max-num-seqs.x", "4"], ["-q"], [*allowed, "--seed", "1"]):
            answer = refusal(warned, model("with-flag", engine={**with_flag, "args": args}))
            assert "flags that are not allowed" in answer, args
        assert f"engine.image is not of {registry}" in refusal(warned, model("elsewhere", engine={"image": "engine:1"}))
        for engine in ({"image": f"{registry}/engine:1"}, {"image": f"{registry}/engine:1", "args": allowed}):
            assert refusal(warned, model("listed", engine=engine)) == ""
        finalized = ("patch", "cachedmodel", "before", "--type=merge", "-p", '{"metadata":{"labels":{"a":"b"}}}')
        warned.kubectl("-n", SERVED, *finalized)  # as the operator does, of a model that was there before
    finally:
        for built in policies:
            warned.kubectl("delete", built["kind"], built["metadata"]["name"])


def refusal(server: Server, obj: Mapping[str, Any]) -> str:
    """Why the API server does not admit an object; empty if it does. A refused one leaves nothing."""
    moved = {**obj, "metadata": {**obj["metadata"], "namespace": SERVED}}
    try:
        server.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(moved))
    except AssertionError as refused:
        return str(refused)
    return ""


async def test_warnings_about_a_pod_are_found_by_its_uid_the_newest_last(
    warned: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, uid, kind, at in (("b", "u1", "Warning", 2), ("a", "u1", "Warning", 1), ("c", "u2", "Warning", 3)):
        warned.apply(event(name, uid, kind, at))
    warned.apply(event("d", "u1", "Normal", 4))
    monkeypatch.setenv("KUBECONFIG", str(warned.kubeconfig))
    kube = await Kube.connect()
    try:
        assert await warnings_about(kube, SERVED, "u1") == (Warned("FailedMount", "a"), Warned("FailedMount", "b"))
    finally:
        await kube.close()


def event(name: str, uid: str, kind: str, minute: int) -> dict[str, Any]:
    """An event as the kubelet writes it."""
    at = f"2026-01-01T00:0{minute}:00Z"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": SERVED},
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": SERVED, "uid": uid},
        "type": kind,
        "reason": "FailedMount",
        "message": name,
        "firstTimestamp": at,
        "lastTimestamp": at,
    }

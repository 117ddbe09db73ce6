"""The demo's last chapter: the shortest objects, a key made by the plugin, and the first hit."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from .calls import replica
from .install import MINIMAL, MINIMAL_NAMESPACE
from .kubectl import Kubectl, pod_names, wait_until
from .prompts import STORE_SETTLES_S

if TYPE_CHECKING:
    from .chapters import Stage

MODEL = "smollm2"
TENANT = "acme"
READY_WITHIN_S = 600
SENTENCES = 32
"""A prompt of these has more than 256 tokens, the least that is cached by default, and less than 2,048 in bytes."""


def the_shortest_objects_serve_a_tenant(stage: Stage) -> None:
    """A model and a tenant take 22 lines of YAML and one command for a key; all else has defaults.

    The objects are in manifests/samples/minimal.yaml, in a namespace of their own. They name no tier, no Secret and no
    sizes: the operator makes a tier in the pod's memory, and the key's hash goes into the model's Secret. The effective
    values are in `status.effective`. The command: kubectl kvstrata keys add smollm2 --tenant acme -n team-a.
    """
    kubectl = stage.kubectl
    kubectl.run("delete", "--filename", str(MINIMAL), "--ignore-not-found")
    began_s = time.monotonic()
    kubectl.run("apply", "--filename", str(MINIMAL))
    try:
        key = kubectl.run("kvstrata", "keys", "add", MODEL, "--tenant", TENANT, "-n", MINIMAL_NAMESPACE).strip()
        wait_until("the shortest model is ready", lambda: _is_ready(kubectl), READY_WITHIN_S, every_s=0.5)
        stage.report(f"ready {time.monotonic() - began_s:.0f} s after kubectl apply")
        stage.report(kubectl.run("-n", MINIMAL_NAMESPACE, "get", "cache-status"))
        (pod,) = pod_names(kubectl.list("pod", MINIMAL_NAMESPACE, f"kvstrata.io/model={MODEL}"))
        prompt = f"[{secrets.token_hex(8)}] " + "The library opens at nine and closes at six. " * SENTENCES
        with replica(kubectl, MINIMAL_NAMESPACE, MODEL, pod) as where:
            first = where.complete(key, prompt)
            assert first.status == 200, f"the model answered {first.status}: {first.body}"
            time.sleep(STORE_SETTLES_S)
            second = where.complete(key, prompt)
            stranger = where.complete("acme-demo-key", prompt)
        stage.report(f"acme's new prompt: {first.cached_tokens} tokens cached, {first.took_s:.2f} s")
        stage.report(f"acme's same prompt: {second.cached_tokens} tokens cached, {second.took_s:.2f} s")
        stage.report(f"a key of the other namespace: {stranger.status}")
        assert first.cached_tokens == 0, "a prompt that no tenant has sent before was found"
        assert second.cached_tokens > 0, "acme's prompt was not found again"
        assert stranger.status == 401, stranger.body
        began_s = time.monotonic()
        kubectl.run("delete", "--filename", str(MINIMAL))
        stage.report(f"model and policy are deleted, and acme's blocks gone, after {time.monotonic() - began_s:.0f} s")
    finally:
        kubectl.run("delete", "--filename", str(MINIMAL), "--ignore-not-found", "--wait=false")


def _is_ready(kubectl: Kubectl) -> bool:
    found = kubectl.condition("cachedmodel", MODEL, MINIMAL_NAMESPACE, "Ready")
    return found.get("status") == "True" and found.get("reason") != "NoLivePods"

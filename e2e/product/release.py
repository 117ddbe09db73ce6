"""A release of the chart beside the demo's, with an operator and a namespace of its own, and small objects to serve.

The images are those that the demo loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import yaml

from .direct_operator import SELECTOR
from .install import CHARTS, READY_TIMEOUT_S, SAMPLES, unsettled
from .kubectl import Kubectl, wait_until
from .shared_tier import TIER

SAMPLES_USED = ("10-cachedomain", "30-api-keys", "40-cachedmodel")
ENGINE_BLOCKS = "96"
"""Of 32 tokens. Some of these engines run beside the demo's."""

PODS = "kvstrata.io/model"
Raw = dict[str, Any]


class Release:
    """An installed release: its name, and the namespace of its operator."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self._kubectl, self.name, self.namespace = kubectl, name, f"{name}-system"

    def stop(self) -> None:
        """End its operator; returns when no pod of it is left."""
        self._scale(0)
        wait_until("no operator runs", lambda: not self._kubectl.list("pod", self.namespace, SELECTOR))

    def start(self) -> None:
        """Start its operator."""
        self._scale(1)

    def _scale(self, replicas: int) -> None:
        name = f"deployment/{self.name}-kvstrata"
        self._kubectl.run("-n", self.namespace, "scale", name, f"--replicas={replicas}")


@contextmanager
def namespace(kubectl: Kubectl, name: str, **labels: str) -> Iterator[str]:
    """Let a namespace be there while the block runs. Its end waits for an operator that serves it."""
    try:
        metadata = {"name": name, "labels": labels}
        kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        yield name
    finally:
        kubectl.run("delete", "namespace", name, "--ignore-not-found", timeout_s=READY_TIMEOUT_S)


@contextmanager
def release(kubectl: Kubectl, name: str, served: str, *settings: str) -> Iterator[Release]:
    """Let a release with one operator serve a namespace while the block runs, with further settings of the chart."""
    made = Release(kubectl, name)
    with ExitStack() as afterwards:
        afterwards.callback(kubectl.run, "delete", "namespace", made.namespace, "--ignore-not-found")
        afterwards.callback(kubectl.helm, "uninstall", name, "-n", made.namespace, "--ignore-not-found")
        # The demo's release and this one would each warn of the other's namespaces.
        settings = (f"watchNamespaces={{{served}}}", "replicas=1", "warnOfUnservedNamespaces=false", *settings)
        chosen = [word for setting in settings for word in ("--set", setting)]
        where = (name, str(CHARTS / "kvstrata"), "-n", made.namespace, "--create-namespace")
        kubectl.helm("upgrade", "--install", *where, *chosen, "--wait")
        yield made


def api_object(kind: str, name: str, where: str, spec: Mapping[str, Any]) -> Raw:
    """Return an object of this API."""
    metadata = {"name": name, "namespace": where}
    return {"apiVersion": "kvstrata.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": dict(spec)}


def small_domain(where: str) -> list[Raw]:
    """Return the demo's domain, keys of callers and model in a namespace, with one pod and a Redis tier of one server,
    and the policy of acme, which goes without an erasure."""
    found = [one for name in SAMPLES_USED for one in yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text())]
    model = next(one["spec"] for one in found if one["kind"] == "CachedModel")
    model["engine"]["args"][-1] = ENGINE_BLOCKS
    model["engine"] |= {"replicas": 1, "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}}}
    model |= {"tiers": [{"name": TIER}], "probe": {"mode": "Never"}}
    for one in found:
        one["metadata"]["namespace"] = where
    redis = {"medium": "Redis", "capacity": "192Mi", "redis": {"managed": {}}}
    policy = {"tenant": "acme", "isolation": "Isolated", "deletionPolicy": "Abandon"}
    return [*found, api_object("CacheTier", TIER, where, redis), api_object("TenantCachePolicy", "acme", where, policy)]


def spec_of(objects: list[Raw], kind: str, name: str) -> Raw:
    """Return the spec of one of some objects, to be changed."""
    found: Raw = next(one["spec"] for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def wait_settled(kubectl: Kubectl, where: str, *, but: str = "") -> None:
    """Wait until all objects of a namespace are Ready and enforced, except one, as `kind/name`."""

    def others() -> list[str]:
        return [one for one in unsettled(kubectl, where) if not (but and one.startswith(f"{but}:"))]

    try:
        wait_until(f"everything in {where} is ready and enforced", lambda: not others(), READY_TIMEOUT_S, every_s=1)
    except AssertionError as late:
        raise AssertionError("\n".join((str(late), *others()))) from late


def annotate(kubectl: Kubectl, kind: str, name: str, where: str, annotation: str, value: str | None) -> None:
    """Give an object an annotation, or remove it."""
    patch = json.dumps({"metadata": {"annotations": {annotation: value}}})
    kubectl.run("-n", where, "patch", kind.lower(), name, "--type", "merge", "-p", patch)

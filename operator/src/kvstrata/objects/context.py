"""Settings of the installation that builders need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EMPTY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Settings of the operator's installation, constant per process.

    `operator_labels` and `operator_namespace` select the peers of the gates' control port. `service_monitors`: whether
    the cluster knows that kind. `nodefs_reserve_percent` of a node's file system stay free of a tier's files: below its
    threshold, 10 % by default, the kubelet evicts the pod. `image_pull_secrets`, `job_placement` (fields of a pod's
    spec) and `job_resources` (its container's, over the default) are for pods in the operator's namespace.
    `metrics_from` has the peers (NetworkPolicyPeer) that may read metrics and health of gates; empty for every pod.
    `run_as` is the user and group of all pods; None leaves both to the platform. With `egress_ports`, pods of models
    open connections to these TCP ports, managed servers and DNS only. `child_labels` and `child_annotations` are for
    pods, and for all objects but Secrets.
    """

    sidecar_image: str
    redis_image: str
    image_pull_policy: str = "IfNotPresent"
    operator_namespace: str = "kvstrata-system"
    operator_labels: Mapping[str, str] = field(
        default_factory=lambda: {"app.kubernetes.io/name": "kvstrata", "app.kubernetes.io/component": "operator"}
    )
    cluster_domain: str = "cluster.local"
    service_monitors: bool = False
    nodefs_reserve_percent: int = 11
    image_pull_secrets: tuple[str, ...] = ()
    job_placement: Mapping[str, Any] = field(default_factory=dict)
    job_resources: Mapping[str, Any] = field(default_factory=dict)
    metrics_from: tuple[Mapping[str, Any], ...] = ()
    run_as: int | None = 65532
    egress_ports: tuple[int, ...] = ()
    child_labels: Mapping[str, str] = field(default_factory=dict)
    child_annotations: Mapping[str, str] = field(default_factory=dict)

    def marked(self, built: dict[str, Any], labels: Mapping[str, str] = EMPTY) -> dict[str, Any]:
        """Return an object with the labels and annotations of all children, which its pod template gets, too, and with
        `labels`. Those that it has already win."""
        if not (labels or self.child_labels or self.child_annotations):
            return built
        own = built["metadata"]
        every = {**self.child_labels, **labels, **own.get("labels", {})}
        notes = {**self.child_annotations, **own.get("annotations", {})}
        marked = {**built, "metadata": {**own, "labels": every, **({"annotations": notes} if notes else {})}}
        if "template" in built.get("spec", {}):
            marked["spec"] = {**built["spec"], "template": self.marked(built["spec"]["template"])}
        return marked

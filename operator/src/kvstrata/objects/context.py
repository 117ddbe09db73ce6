"""Settings of the installation that builders need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.api.pod_template import PodTemplate
from kvstrata.objects.applied import without_empty


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

    def labelled(self, built: dict[str, Any], chosen: PodTemplate) -> dict[str, Any]:
        """Return an object, and its pod template, with the labels and annotations of the installation and the user.
        Those that it has already win."""
        own = built["metadata"]
        every = {**self.child_labels, **chosen.labels, **own.get("labels", {})}
        notes = {**self.child_annotations, **chosen.annotations, **own.get("annotations", {})}
        found = {**built, "metadata": without_empty({**own, "labels": every, "annotations": notes})}
        if "template" in built.get("spec", {}):
            found["spec"] = {**built["spec"], "template": self.labelled(built["spec"]["template"], chosen)}
        return found

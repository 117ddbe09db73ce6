"""What builders need to know of the installation that they build for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Settings of the operator's own installation; the same for every object of a process.

    `operator_labels` select the operator's pods: with `operator_namespace` they are the peer that may reach the
    gates' control port. `cluster_domain` is the suffix of the cluster's DNS names, `service_monitors` whether the
    cluster knows that kind. `nodefs_reserve_percent` of a node's own file system stay free of a tier's files: below its
    threshold, by default a tenth, the kubelet would evict the pod with all that it has. `image_pull_secrets` are
    Secrets of the operator's namespace with which pods there pull their images, `job_placement` are fields of a pod's
    spec that say where Jobs there may run.
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

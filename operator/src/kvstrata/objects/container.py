"""Parts of containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.pod_template import EnvVar, ResourceRequirements

from .applied import without_empty
from .quantities import canonical_amounts, canonical_quantity

SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""A container's part of the restricted Pod Security Standard, and a read-only root."""

LAST_OF_LOG = "FallbackToLogsOnError"
"""`terminationMessagePolicy`: the pod's status has the end of the log of a container that failed."""


def container(name: str, image: str, pull_policy: str | None, **fields: Any) -> dict[str, Any]:
    security = {"securityContext": SECURITY, "terminationMessagePolicy": LAST_OF_LOG}
    return without_empty({"name": name, "image": image, "imagePullPolicy": pull_policy, **security, **fields})


def amounts(requests: Mapping[str, str], limits: Mapping[str, str]) -> dict[str, Any]:
    built = {"requests": canonical_amounts(requests), "limits": canonical_amounts(limits)}
    return {part: values for part, values in built.items() if values}


def chosen_amounts(chosen: ResourceRequirements | None, default: Mapping[str, Any]) -> dict[str, Any]:
    return dict(default) if chosen is None else amounts(chosen.requests, chosen.limits)


def mount(volume: str, path: str, *, read_only: bool = False, sub_path: str = "") -> dict[str, Any]:
    built: dict[str, Any] = {"name": volume, "mountPath": path}
    if read_only:
        built["readOnly"] = True
    if sub_path:
        built["subPath"] = sub_path
    return built


def empty_dir(name: str, limit: str | None) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"sizeLimit": canonical_quantity(limit)} if limit is not None else {}}


def environment(own: Mapping[str, str], users: Sequence[EnvVar] = ()) -> list[dict[str, Any]]:
    """Return env entries: the operator's, then the user's in their order; the user's value wins. Admission rejects
    variables that the operator must own, so only defaults are overridden."""
    chosen = [variable.to_kubernetes() for variable in users]
    taken = {one["name"] for one in chosen}
    defaults = [{"name": name, "value": value} for name, value in own.items() if name not in taken]
    return [without_empty(one) for one in (*defaults, *chosen)]


def field_environment(name: str, field_path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field_path}}}


def exec_probe(command: Sequence[str], *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    """Each run starts a process in the container, which costs a node far more than an HTTP request."""
    return {
        "exec": {"command": list(command)},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }

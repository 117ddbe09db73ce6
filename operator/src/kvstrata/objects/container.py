"""Pieces that containers are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstrata.api.pod_template import ResourceRequirements

from .quantities import canonical_amounts

SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""A container's part of the restricted Pod Security Standard, and a read-only root."""


def amounts(requests: Mapping[str, str], limits: Mapping[str, str]) -> dict[str, Any]:
    """Return a container's resources in canonical form, without empty parts."""
    built = {"requests": canonical_amounts(requests), "limits": canonical_amounts(limits)}
    return {part: values for part, values in built.items() if values}


def chosen_amounts(chosen: ResourceRequirements | None, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's resources as they are, or the default when there are none."""
    return dict(default) if chosen is None else amounts(chosen.requests, chosen.limits)


def mount(volume: str, path: str, *, read_only: bool = False, sub_path: str = "") -> dict[str, Any]:
    """Return a volumeMount."""
    built: dict[str, Any] = {"name": volume, "mountPath": path}
    if read_only:
        built["readOnly"] = True
    if sub_path:
        built["subPath"] = sub_path
    return built


def environment(own: Mapping[str, str], users: Sequence[tuple[str, str]] = ()) -> list[dict[str, str]]:
    """Return env entries: the operator's, then the user's in their order; the user's word stands on equal names.

    Variables that the operator must own are refused at admission, so what is equal here is a default.
    """
    chosen = dict(users)
    values = [(name, value) for name, value in own.items() if name not in chosen] + list(chosen.items())
    return [{"name": name, "value": value} if value else {"name": name} for name, value in values]


def field_environment(name: str, field_path: str) -> dict[str, Any]:
    """Return an env entry that holds a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field_path}}}


def exec_probe(command: Sequence[str], *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    """Return a probe that runs a command."""
    return {
        "exec": {"command": list(command)},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def http_probe(path: str, port: int, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    """Return a probe that asks for a path over plain HTTP."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }

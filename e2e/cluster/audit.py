"""The API server's own audit log of every write by a service account.

It names the pod whose token was used, and so distinguishes two replicas of one Deployment; no field of an object does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from e2e.cluster.progress import ClusterError

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # The controllers of Kubernetes itself use service accounts, too.
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "None", "resources": [{"group": "authentication.k8s.io"}]},
        {
            "level": "Metadata",
            "userGroups": ["system:serviceaccounts"],
            "verbs": ["create", "update", "patch", "delete", "deletecollection"],
        },
        {"level": "None"},
    ],
}
POD_NAME = "authentication.kubernetes.io/pod-name"


def audit_log(directory: Path) -> Path:
    """Where the control plane in `directory` keeps its audit log."""
    return directory / "log" / "audit.log"


def audit_options(directory: Path) -> list[str]:
    """Write the policy into the control plane's folder; return the API server's options that follow it."""
    policy = directory / "audit-policy.json"
    policy.write_text(json.dumps(POLICY, indent=1) + "\n")
    return [f"--audit-policy-file={policy}", f"--audit-log-path={audit_log(directory)}", "--audit-log-maxsize=1000"]


@dataclass(frozen=True, slots=True)
class Write:
    """One write that the API server answered. `received_at` is when it came, `code` its HTTP status."""

    pod: str
    account: str
    verb: str
    resource: str
    namespace: str
    name: str
    subresource: str
    code: int
    received_at: datetime

    @property
    def done(self) -> bool:
        """Whether it took effect."""
        return 200 <= self.code <= 299


class AuditLog:
    """The log of a running control plane, read from now on.

    Raises:
        ClusterError: this control plane keeps none.
    """

    def __init__(self, directory: Path) -> None:
        self._path = audit_log(directory)
        try:
            self._offset = self._path.stat().st_size
        except FileNotFoundError as error:
            raise ClusterError("the control plane keeps no audit log", advice="restart the cluster") from error

    def writes(self) -> list[Write]:
        """Everything that was written since this object was made, in the order of the answers."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            return list(_decoded(log.read()))


def _decoded(text: bytes) -> Iterator[Write]:
    for line in text.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return  # it is being written
        event = json.loads(line)
        if event["stage"] in ("ResponseComplete", "Panic"):
            yield _write(event)


def _write(event: dict[str, Any]) -> Write:
    about = event.get("objectRef") or {}
    user = event["user"]
    return Write(
        pod="".join((user.get("extra") or {}).get(POD_NAME) or ()),
        account=user["username"],
        verb=event["verb"],
        resource=about.get("resource", ""),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        subresource=about.get("subresource", ""),
        code=int((event.get("responseStatus") or {}).get("code") or 0),
        received_at=datetime.fromisoformat(event["requestReceivedTimestamp"]),
    )

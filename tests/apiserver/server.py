"""What these tests ask of the apiserver, by kubectl, as a user would."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from e2e.product.api_reader import ApiReader

NAMESPACE = "demo"
EVERYTHING = (
    "cache-status,deployments,statefulsets,services,serviceaccounts,poddisruptionbudgets,networkpolicies,roles,"
    "rolebindings,secrets"
)


class Server:
    """Administrator's access to one control plane."""

    def __init__(self, kubectl: Path, kubeconfig: Path) -> None:
        self.kubectl_path = kubectl
        self.kubeconfig = kubeconfig
        self._reader = ApiReader(kubeconfig)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl and return what it printed. Raises AssertionError with its complaint."""
        done = subprocess.run(
            [str(self.kubectl_path), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, obj: Mapping[str, Any]) -> None:
        """Apply an object as a user."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(obj))

    def patch(self, kind: str, name: str, **spec: Any) -> None:
        """Change fields of a spec."""
        self.kubectl("-n", NAMESPACE, "patch", kind, name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or None."""
        status, found = self._reader.read(kind, NAMESPACE, name)
        if status in (200, 404):
            return found or None
        text = self.kubectl("-n", NAMESPACE, "get", kind, name, "--ignore-not-found", "-o", "json")
        return dict(json.loads(text)) if text.strip() else None

    def condition(self, kind: str, name: str, condition: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = self.get(kind, name) or {}
        conditions = (found.get("status") or {}).get("conditions") or ()
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == condition), ("", ""))

    def versions(self) -> dict[str, str]:
        """The resourceVersion of every object that an operator could write."""
        items = json.loads(self.kubectl("-n", NAMESPACE, "get", EVERYTHING, "-o", "json"))["items"]
        return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in items}

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}"
            time.sleep(0.2)

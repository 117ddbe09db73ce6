"""Receipts of the demo's domain, or of another release's, verified by the plugin as a security officer would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from e2e.cluster.settings import REPOSITORY

from .install import DEMO_NAMESPACE, SYSTEM_NAMESPACE
from .kubectl import Kubectl


class Receipts:
    """All receipts of the domain with the public key, as files, once they are verified as a chain."""

    def __init__(
        self, kubectl: Kubectl, folder: Path, namespace: str = DEMO_NAMESPACE, system: str = SYSTEM_NAMESPACE
    ) -> None:
        domain = str(kubectl.get("cachedomain", "default", namespace)["status"]["domainID"])
        self._folder, keys = folder / "receipts", folder / "keys"
        _receipt("keys", "--namespace", system, "--to", str(keys))
        _receipt("export", "--namespace", system, "--domain", domain, "--to", str(self._folder))
        (self.key,) = sorted(keys.glob("*.pem"))
        self.verified = _receipt("verify", str(self._folder), "--chain", "--public-key", str(self.key))

    def of(self, order: str, *claims: str) -> Path:
        """Return the receipt of an order, which has to prove these claims."""
        (found,) = (one for one in self._folder.glob("*.json") if f'"{order}"' in one.read_text())
        required = [word for claim in claims for word in ("--require", claim)]
        assert order in _receipt("verify", str(found), "--public-key", str(self.key), *required)
        return found


def _receipt(*arguments: str) -> str:
    """Output of `kubectl kvstrata receipt`, which has to succeed."""
    found = run(*arguments)
    assert found.returncode == 0, f"{arguments}: {found.returncode}\n{found.stdout}{found.stderr}"
    return found.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kubectl kvstrata receipt` with these arguments; return its exit code and output."""
    kubeconfig, binaries = REPOSITORY / ".local/kubeconfig", REPOSITORY / ".local/bin"
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "operator/src"),
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{binaries}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "kvstrata.cli.plugin", "receipt", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

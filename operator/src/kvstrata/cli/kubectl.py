"""A cluster as kubectl sees it, with the caller's rights: the plugin has no client of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from typing import Any

from kvstrata.cli.text import CommandError

TIMEOUT_S = 120
_UNREACHABLE = ("refused", "no such host", "i/o timeout", "unable to connect", "no configuration has been provided")


class KubectlError(CommandError):
    """kubectl is missing or failed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A namespace, and kubectl's context and configuration; None is kubectl's default."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def get(self, *arguments: str) -> Any:
        """Return the objects of `kubectl get`. Raises KubectlError with its message."""
        return json.loads(self.run("get", *arguments, "--output=json"))

    def run(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """Return the output of kubectl. Raises KubectlError."""
        flags = [f"--namespace={self.namespace}"] if self.namespace else []
        flags += [f"--context={self.context}"] if self.context else []
        flags += [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        try:
            done = subprocess.run(
                ["kubectl", *flags, *arguments], input=stdin, capture_output=True, check=False, timeout=TIMEOUT_S
            )
        except FileNotFoundError:
            raise KubectlError("kubectl is not on the path: install it, or add its folder to PATH") from None
        except subprocess.TimeoutExpired:
            raise KubectlError(
                f"kubectl did not answer within {TIMEOUT_S} s: try again, or look at the cluster"
            ) from None
        if done.returncode != 0:
            raise KubectlError(_sentence(done.stderr.decode(errors="replace")))
        return done.stdout


def add_cluster(parser: argparse.ArgumentParser, namespace: str | None, meaning: str) -> None:
    """Add the options that `cluster` reads. `namespace` None is the namespace of kubectl's context."""
    parser.add_argument("-n", "--namespace", default=namespace, help=meaning)
    parser.add_argument("--context", help="kubectl's context")
    parser.add_argument("--kubeconfig", help="kubectl's configuration")


def cluster(options: argparse.Namespace) -> Cluster:
    return Cluster(options.namespace, options.context, options.kubeconfig)


def unserved(objects: list[Any]) -> str:
    """Return a sentence if no CacheDomain among a namespace's objects has the claim of an operator; else nothing."""
    served = any("servedBy" in (one.get("status") or {}) for one in objects)
    return "" if served else "no operator serves the namespace: add it to watchNamespaces of a release\n"


def _sentence(errors: str) -> str:
    """Return kubectl's last line: those before it repeat that the same request failed."""
    last = errors.strip().rpartition("\n")[2] or "kubectl failed without a message"
    if any(sign in last.lower() for sign in _UNREACHABLE):
        return f"no cluster answers, name one with --context or --kubeconfig: {last}"
    return last

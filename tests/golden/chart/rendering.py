"""Render the charts with the real Helm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
OPERATOR_CHART = REPOSITORY / "charts/kvstrata"
CRD_CHART = REPOSITORY / "charts/kvstrata-crds"
NAMESPACE = "kvstrata-system"


class RefusedError(Exception):
    """Helm refused the values; the message is Helm's."""


def program(name: str) -> str:
    """The path of `helm` or `kubectl`: the local cluster's, else an installed one; skips the test without either."""
    folder = os.pathsep.join([str(REPOSITORY / ".local/bin"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=folder)
    if found is None:
        pytest.skip(f"{name} is not here: `python3 -m e2e.cluster build` makes it")
    return found


def render_text(chart: Path, values: Mapping[str, Any] | None = None, release: str = "kvstrata") -> str:
    """Return what `helm template` prints. Raises RefusedError when Helm refuses."""
    finished = subprocess.run(
        [program("helm"), "template", release, str(chart), "--namespace", NAMESPACE, "--values", "-"],
        input=json.dumps(values or {}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if finished.returncode != 0:
        raise RefusedError(finished.stderr)
    return finished.stdout


def render(
    chart: Path, values: Mapping[str, Any] | None = None, release: str = "kvstrata"
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rendered objects by (kind, name); in namespaces other than the release's, by `namespace/name`."""
    objects: dict[tuple[str, str], dict[str, Any]] = {}
    for document in yaml.safe_load_all(render_text(chart, values, release)):
        if document is None:
            continue
        metadata = document["metadata"]
        namespace = metadata.get("namespace", NAMESPACE)
        name = metadata["name"] if namespace == NAMESPACE else f"{namespace}/{metadata['name']}"
        assert (document["kind"], name) not in objects, f"{document['kind']} {name} is rendered twice"
        objects[document["kind"], name] = document
    return objects

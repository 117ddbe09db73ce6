"""Installation of the product: images, charts, samples; and the wait until it is ready."""

from __future__ import annotations

import json
import shlex
import sys
import tarfile
from pathlib import Path

from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.images.__main__ import load as load_images
from e2e.images.catalogue import select

from .kubectl import Kubectl, wait_until

SYSTEM_NAMESPACE = "kvstrata-system"
DEMO_NAMESPACE = "demo"
MINIMAL_NAMESPACE = "team-a"
"""The namespace of `MINIMAL`."""
SAMPLES = REPOSITORY / "manifests" / "samples"
MINIMAL = SAMPLES / "minimal.yaml"
"""The shortest objects, which the demo applies last."""
CHARTS = REPOSITORY / "charts"
READY_TIMEOUT_S = 600
IMAGES = select(["operator", "sidecar", "redis", "engine-cpu"])
"""Images of the charts and the samples; scenario tests load servers of other kinds themselves."""
LOADED_IMAGES = "demo-images"
KINDS = ("cachedomain", "cachetier", "cachedmodel", "tenantcachepolicy", "tenantgroup", "prefixpool")
NODEFS_RESERVE_PERCENT = 0
"""The local cluster's kubelet asks for 512 MiB on a disk of any size; its tiers' files take less than that."""


NO_PROBES = '{"spec": {"probe": {"mode": "Never"}}}'
"""The stories count prompts and blocks, and a probe of isolation adds some."""


def install(kubectl: Kubectl, progress: Progress, paths: Paths | None = None) -> None:
    """Load the images, install both charts and apply the samples; returns when everything is ready and enforced."""
    if load_images(IMAGES, paths or Paths()):
        raise SystemExit(1)
    with progress.step("create the demo's namespaces"):
        kubectl.run("apply", "-f", str(SAMPLES / "00-namespace.yaml"))
    with progress.step("install the charts"):
        kubectl.helm("upgrade", "--install", "kvstrata-crds", str(CHARTS / "kvstrata-crds"), "--wait")
        kubectl.helm(
            "upgrade",
            "--install",
            "kvstrata",
            str(CHARTS / "kvstrata"),
            "--namespace",
            SYSTEM_NAMESPACE,
            "--create-namespace",
            "--set",
            f"watchNamespaces={{{DEMO_NAMESPACE},{MINIMAL_NAMESPACE}}}",
            "--set",
            f"nodefsReservePercent={NODEFS_RESERVE_PERCENT}",
            "--wait",
        )
    put_plugin_on_path(paths or Paths())
    restart_what_runs_an_older_image(kubectl, progress, paths or Paths())
    with progress.step("apply the samples"):
        files = sorted(SAMPLES.glob("[0-9]*.yaml"))
        kubectl.run("apply", *(f"--filename={path}" for path in files))
        kubectl.run("-n", DEMO_NAMESPACE, "patch", "cachedmodel", "smollm2", "--type", "merge", "-p", NO_PROBES)
    with progress.step("wait until everything is ready and enforced"):
        wait_until("every sample is ready and enforced", lambda: not unsettled(kubectl), READY_TIMEOUT_S, every_s=1)


def put_plugin_on_path(paths: Paths) -> None:
    """Write `kubectl-kvstrata`, which runs the plugin of this checkout, beside kubectl."""
    own = paths.local / "venv" / "bin" / "python"
    python, source = own if own.exists() else Path(sys.executable), REPOSITORY / "operator" / "src"
    script = paths.bin / "kubectl-kvstrata"
    command = f'PYTHONPATH={shlex.quote(str(source))} exec {shlex.quote(str(python))} -m kvstrata.cli.plugin "$@"'
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)


def restart_what_runs_an_older_image(kubectl: Kubectl, progress: Progress, paths: Paths) -> None:
    """Images keep their tag while they are developed, so Kubernetes cannot see that one has changed."""
    loaded = {image.name: _content(image.archive(paths)) for image in IMAGES}
    known = kubectl.list("configmap", SYSTEM_NAMESPACE, f"{LOADED_IMAGES}=true")
    before = known[0]["data"] if known else loaded
    changed = {name for name, content in loaded.items() if before.get(name) != content}
    if "operator" in changed:
        with progress.step("restart the operator with its new image"):
            kubectl.run("-n", SYSTEM_NAMESPACE, "rollout", "restart", "deployment/kvstrata")
            kubectl.run("-n", SYSTEM_NAMESPACE, "rollout", "status", "deployment/kvstrata", "--timeout=120s")
    if changed - {"operator"}:
        with progress.step("restart the pods with their new images"):
            kubectl.run("-n", DEMO_NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/managed-by=kvstrata")
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": LOADED_IMAGES, "namespace": SYSTEM_NAMESPACE, "labels": {LOADED_IMAGES: "true"}},
            "data": loaded,
        }
    )


def _content(archive: Path) -> str:
    """Return the digest of an image's configuration, which changes with everything in the image."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        if manifest is None:
            raise ValueError(f"{archive} is no image")
        return str(json.load(manifest)[0]["Config"])


def unsettled(kubectl: Kubectl, namespace: str = DEMO_NAMESPACE) -> list[str]:
    """Return the objects that are not Ready, or not Enforced where the kind has that, each with its reason."""
    problems = []
    for kind in KINDS:
        for item in kubectl.list(kind, namespace):
            conditions = {c["type"]: c for c in (item.get("status") or {}).get("conditions") or ()}
            current = (item.get("status") or {}).get("observedGeneration") == item["metadata"]["generation"]
            for wanted in ("Ready", "Enforced", "PolicyEnforced"):
                found = conditions.get(wanted)
                if wanted == "Ready" and not (found and current):
                    problems.append(f"{kind}/{item['metadata']['name']}: not observed")
                elif found and (found["status"] != "True" or found["reason"] == "NoLivePods"):
                    problems.append(f"{kind}/{item['metadata']['name']}: {wanted} {found['status']} {found['reason']}")
    return problems

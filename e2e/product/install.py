"""Installing the product: images, charts, samples; and waiting until it says that it is ready."""

from __future__ import annotations

from e2e.cluster.progress import Progress
from e2e.cluster.settings import REPOSITORY, Paths
from e2e.images.__main__ import load as load_images
from e2e.images.catalogue import IMAGES

from .kubectl import Kubectl, wait_until

SYSTEM_NAMESPACE = "kvstrata-system"
DEMO_NAMESPACE = "demo"
SAMPLES = REPOSITORY / "manifests" / "samples"
CHARTS = REPOSITORY / "charts"
READY_TIMEOUT_S = 600
KINDS = ("cachedomain", "cachetier", "cachedmodel", "tenantcachepolicy", "tenantgroup")


def install(kubectl: Kubectl, progress: Progress, paths: Paths | None = None) -> None:
    """Load the images, install both charts and apply the samples; returns when everything is ready and enforced."""
    if load_images(IMAGES, paths or Paths()):
        raise SystemExit(1)
    with progress.step("create the demo's namespace"):
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
            f"watchNamespaces={{{DEMO_NAMESPACE}}}",
            "--wait",
        )
    with progress.step("apply the samples"):
        kubectl.run("apply", "-f", str(SAMPLES))
    with progress.step("wait until everything is ready and enforced"):
        wait_until("every sample is ready and enforced", lambda: not unsettled(kubectl), READY_TIMEOUT_S, every_s=1)


def unsettled(kubectl: Kubectl, namespace: str = DEMO_NAMESPACE) -> list[str]:
    """Return what is not Ready, or not Enforced where the kind has that, with its reason."""
    problems = []
    for kind in KINDS:
        for item in kubectl.list(kind, namespace):
            conditions = {c["type"]: c for c in (item.get("status") or {}).get("conditions") or ()}
            current = (item.get("status") or {}).get("observedGeneration") == item["metadata"]["generation"]
            for wanted in ("Ready", "Enforced", "PolicyEnforced"):
                found = conditions.get(wanted)
                if wanted == "Ready" and not (found and current):
                    problems.append(f"{kind}/{item['metadata']['name']}: not observed")
                elif found and found["status"] != "True":
                    problems.append(f"{kind}/{item['metadata']['name']}: {wanted} {found['status']} {found['reason']}")
    return problems

"""Where things live, which versions are built, and which addresses the cluster uses.

This is the only module of the package that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

KUBERNETES_VERSION = "1.35.4"
HELM_VERSION = "v4.1.4"

COMPONENTS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
    "kubectl", "helm", "coredns",
)  # fmt: skip
"""Names under which the one multi-call binary is linked."""

PAUSE_IMAGE = "localhost/pause:3.10"
COREDNS_IMAGE = "localhost/coredns:local"


@dataclass(frozen=True, slots=True)
class Debian:
    """A suite of Debian.

    Attributes:
        suite: its name.
        point_release: the one that all was tested on. It fixes every package's version: no other archive of Debian's is
            used besides.
        registry_image: Debian's own image of it, on which Docker builds.
    """

    suite: str
    point_release: str
    registry_image: str

    @property
    def base_image(self) -> str:
        """The name of the base image that is made of it."""
        return f"localhost/kvstrata-base:{self.suite}"


BOOKWORM = Debian(
    "bookworm",
    "12.15",
    "debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251",
)
TRIXIE = Debian(
    "trixie",
    "13.8",
    "debian:trixie-20260918-slim@sha256:a99cfc517144bc59b1978475ec53b46ecabec7e43635402ee5b77cc54cd1b20a",
)
NODE_DEBIAN = BOOKWORM
"""System of the local node: docs/adr/0007-local-cluster.md."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Every path that the package writes, all below one folder.

    Attributes:
        local: the folder, by default ``.local`` of the repository.
    """

    local: Path = REPOSITORY / ".local"

    @property
    def bin(self) -> Path:
        """Binaries for the cluster and for users: kubectl, helm and the rest."""
        return self.local / "bin"

    @property
    def rootfs(self) -> Path:
        """The node's root file system: Debian with containerd, runc and buildah."""
        return self.local / "rootfs"

    def unpacked(self, image: str) -> Path:
        """Programs and libraries of a server's image, which tests run without a container."""
        return self.local / "unpacked" / image

    @property
    def images(self) -> Path:
        """Docker-archive files of the images that the cluster itself needs."""
        return self.local / "images"

    @property
    def buildah(self) -> Path:
        """The image builder's storage: layers, base images."""
        return self.local / "buildah"

    @property
    def digests(self) -> Path:
        """Digests of the inputs of each build, so that unchanged things are not built again."""
        return self.local / "digests"

    @property
    def node(self) -> Path:
        """State of the running node; removed by ``down`` but for the node's image store."""
        return self.local / "node"

    @property
    def node_disk(self) -> Path:
        """The node's /var/lib/containerd and the like, on a real disk."""
        return self.node / "disk"

    @property
    def control_plane(self) -> Path:
        """State of the control plane that ``control-plane start`` runs alone."""
        return self.local / "control-plane"

    @property
    def logs(self) -> Path:
        """Logs of builds."""
        return self.local / "log"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig of the cluster in use."""
        return self.local / "kubeconfig"

    @property
    def provider(self) -> Path:
        """The kind of cluster that ``up`` made: local, kind or existing."""
        return self.local / "provider"

    @property
    def locks(self) -> Path:
        """Locks between commands that run at the same time."""
        return self.local / "locks"


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses of the local cluster. The node's network is private; only the veth pair and two routes show outside."""

    node_name: str = "kvstrata"
    host_ip: str = "10.89.0.1"
    node_ip: str = "10.89.0.2"
    api_port: int = 6443
    pod_cidr: str = "10.244.0.0/16"
    service_cidr: str = "10.96.0.0/16"
    kubernetes_service_ip: str = "10.96.0.1"
    dns_ip: str = "10.96.0.10"

    @property
    def host_interface(self) -> str:
        """The host's end of the veth pair (Linux allows 15 characters)."""
        return f"v-{self.node_name}"[:15]


KIND_CLUSTER = "kvstrata"


def debian_mirror() -> str:
    """The Debian mirror for the root file system and the base image (``KVSTRATA_DEBIAN_MIRROR`` overrides it)."""
    return os.environ.get("KVSTRATA_DEBIAN_MIRROR", "http://deb.debian.org/debian")


def kubebuilder_assets() -> Path | None:
    """The folder named by ``KUBEBUILDER_ASSETS``, the convention for a ready etcd, kube-apiserver and kubectl."""
    value = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(value) if value else None


def pip_configuration() -> Path | None:
    """The pip configuration file of this machine, if it has one, in pip's own order of precedence."""
    named = os.environ.get("PIP_CONFIG_FILE")
    candidates = [Path(named)] if named and named != os.devnull else []
    candidates += [
        Path.home() / ".config/pip/pip.conf",
        Path.home() / ".pip/pip.conf",
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
    ]
    return next((path for path in candidates if path.is_file()), None)


def ca_bundle() -> Path | None:
    """The bundle of certificate authorities that this machine trusts, if there is one."""
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
    candidates = [Path(os.environ[name]) for name in names if os.environ.get(name)]
    candidates += [Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt")]
    return next((path for path in candidates if path.is_file()), None)


PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "ftp_proxy", "all_proxy")


def build_environment() -> dict[str, str]:
    """Environment that an image build inherits: proxies, and pip's index settings (never its file paths)."""
    wanted = {name for name in os.environ if name.lower() in PROXY_VARIABLES}
    wanted |= set(PIP_INDEX_VARIABLES) & set(os.environ)
    return {name: os.environ[name] for name in sorted(wanted)}


PIP_INDEX_VARIABLES = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES",
)  # fmt: skip


def inherited_environment() -> dict[str, str]:
    """The whole environment of this process, for programs that run as the user's own."""
    return dict(os.environ)

"""The Debian root file system: the node's operating system, the image builder, fio for benchmarks.

Installing containerd on the machine itself would start services there. Here it is unpacked into a folder that only the
node's mount namespace uses as ``/``. Single programs of it (``openssl``, ``ip``, ``fio``), and servers of unpacked
images, also run on the host, through their folder's own dynamic linker, so that they meet the libraries they were built
for.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from e2e.cluster import digests
from e2e.cluster.locks import exclusive
from e2e.cluster.processes import in_own_namespaces, run_logged
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import NODE_DEBIAN, Debian, Paths, debian_mirror, inherited_environment

NODE_PACKAGES = (
    "buildah", "ca-certificates", "conntrack", "containerd", "containernetworking-plugins", "ethtool", "fio",
    "iproute2", "ipset", "iptables", "kmod", "nftables", "openssl", "procps", "python3", "runc", "socat",
)  # fmt: skip
BASE_IMAGE_PACKAGES = ("ca-certificates",)

DPKG_WITHOUT_SYNC = "security-mac,downgrade,unsafe-io"
"""`DPKG_FORCE` of installations that are thrown away when they fail: dpkg's defaults, and no fsync for each file."""

_MACHINES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
LIBRARY_FOLDERS = (*_MACHINES, *(f"{folder}/ceph" for folder in _MACHINES), "usr/lib")
"""One of fio's libraries looks for another in the folder `ceph`, by a path that is absolute."""

LOADERS = ("usr/lib64/ld-linux-x86-64.so.2", "usr/lib/ld-linux-aarch64.so.1")


def build_rootfs(paths: Paths, progress: Progress) -> None:
    """Make ``paths.rootfs``; a quick no-op when it is there with the same packages.

    Raises:
        ClusterError: not root, debootstrap cannot be had, or it failed.
    """
    digest = digests.digest_of({"release": NODE_DEBIAN.point_release, "packages": NODE_PACKAGES})
    with exclusive(paths, "rootfs", progress):
        if paths.rootfs.is_dir() and digests.is_unchanged(paths, "rootfs", digest):
            return
        digests.forget(paths, "rootfs")
        with progress.step(f"make the node's Debian root file system ({len(NODE_PACKAGES)} packages)"):
            log = paths.logs / "debootstrap-rootfs.log"
            debootstrap(paths, paths.rootfs, NODE_DEBIAN, NODE_PACKAGES, log=log)
        report_if_newer(paths.rootfs, NODE_DEBIAN, progress)
        digests.remember(paths, "rootfs", digest)


def debootstrap(paths: Paths, target: Path, debian: Debian, packages: tuple[str, ...], *, log: Path) -> None:
    """Unpack a minimal Debian with ``packages`` into ``target``, which is replaced only when all went well."""
    require_root("making a Debian root file system")
    if any(character.isspace() for character in str(target)):
        raise ClusterError(
            f"debootstrap cannot work below {paths.local}, because that path has a space in it",
            advice="move the repository to a path without spaces",
        )
    program = _debootstrap_program(paths)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    # debootstrap mounts /proc inside the target.
    run_logged(
        in_own_namespaces([
            program, "--variant=minbase", f"--include={','.join(packages)}", debian.suite, partial, debian_mirror(),
        ]),
        log=log,
        env=inherited_environment() | {"DPKG_FORCE": DPKG_WITHOUT_SYNC},
        what="debootstrap",
        advice="check that the Debian mirror can be reached; KVSTRATA_DEBIAN_MIRROR names another one",
    )  # fmt: skip
    shutil.rmtree(partial / "var/cache/apt/archives", ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def report_if_newer(root: Path, debian: Debian, progress: Progress) -> None:
    """Print a note if a root file system is of another point release than the one that all was tested on.

    A mirror has the newest one only, so that to refuse it would end all builds with each new one.
    """
    found = (root / "etc/debian_version").read_text().strip()
    if found != debian.point_release:
        progress.report(
            f"note: this is Debian {found}, and all was tested on {debian.point_release}; for that release, set"
            " KVSTRATA_DEBIAN_MIRROR to a mirror of snapshots"
        )


def require_root(purpose: str) -> None:
    """Raise a ClusterError with the purpose that needs root, unless this process is root."""
    if os.geteuid() != 0:
        raise ClusterError(
            f"{purpose} needs root",
            advice="run the command as root, or use `up --cluster kind` where Docker and kind are installed",
        )


def host_command(root: Path, program: str, *, advice: str = "run `python3 -m e2e.cluster build`") -> list[str]:
    """An argv prefix that runs a program of a Debian root file system on the host.

    Args:
        root: the root file system, or the programs and libraries of one.
        program: its path there, such as ``usr/bin/fio``.
        advice: how to get it.

    Raises:
        ClusterError: the program is not there.
    """
    loader = next((root / name for name in LOADERS if (root / name).exists()), None)
    if loader is None or not (root / program).exists():
        raise ClusterError(f"{root / program} is not there", advice=advice)
    libraries = ":".join(str(root / name) for name in LIBRARY_FOLDERS if (root / name).is_dir())
    return [str(loader), "--library-path", libraries, str(root / program)]


def server_command(image: str = "redis", program: str = "redis-server", paths: Paths | None = None) -> list[str]:
    """An argv prefix that runs a program of a server's image on the host, with TLS and without installing it.

    Append options: ``[*server_command(), "--port", "0", "--unixsocket", path]``. An installed server is not looked for:
    tests should meet the same one everywhere. It needs no root. Raises ClusterError as `host_command` does.
    """
    root = (paths or Paths()).unpacked(image)
    return host_command(root, f"usr/bin/{program}", advice=f"run `python3 -m e2e.images build {image}`")


def fio_command(paths: Paths | None = None) -> list[str]:
    """An argv prefix that runs fio on the host without installing it. Raises ClusterError as `host_command` does."""
    return host_command((paths or Paths()).rootfs, "usr/bin/fio")


def _debootstrap_program(paths: Paths) -> str:
    """Path of debootstrap, installed by apt-get when it is missing: a script that starts no service."""
    with exclusive(paths, "debootstrap", Progress()):
        while (program := shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin:/bin")) is None:
            _install_debootstrap(paths)
        return program


def _install_debootstrap(paths: Paths) -> None:
    apt_get = shutil.which("apt-get")
    if apt_get is None:
        raise ClusterError(
            "debootstrap is not installed, and there is no apt-get to install it",
            advice="install debootstrap by this system's package manager, or use `up --cluster kind`",
        )
    log = paths.logs / "apt-debootstrap.log"
    advice = "install the packages debootstrap and debian-archive-keyring by hand, then try again"
    run_logged([apt_get, "update", "-q"], log=log, what="apt-get update", advice=advice)
    run_logged(
        [apt_get, "install", "-q", "-y", "--no-install-recommends", "debootstrap", "debian-archive-keyring"],
        log=log,
        what="apt-get install debootstrap",
        advice=advice,
    )

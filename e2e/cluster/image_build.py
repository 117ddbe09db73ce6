"""Build images from Dockerfiles, with no registry and no Docker: buildah from the Debian root file system.

The base image is a minimal Debian made here, of the suite that the build argument ``BASE`` names. How this machine
reaches its package index is given to the build as secrets, so that none of it enters an image:

* ``id=pip``: the machine's pip configuration merged with its ``PIP_*`` variables;
* ``id=ca``: the machine's certificate authorities, which that configuration names.

Mount both without a target, so that they appear in ``/run/secrets``: where a secret is mounted over a file of the
image, buildah 1.28 removes that file from the layer.

With Docker (a kind cluster) the same Dockerfiles are built by ``docker build``, on Debian's image from a registry.
"""

from __future__ import annotations

import configparser
import io
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import digests
from e2e.cluster.archive import write_image
from e2e.cluster.ignorefile import context_files, read_patterns
from e2e.cluster.locks import exclusive
from e2e.cluster.node import SHELL
from e2e.cluster.processes import in_own_namespaces, run_logged
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.rootfs import BASE_IMAGE_PACKAGES, build_rootfs, debootstrap, report_if_newer, require_root
from e2e.cluster.settings import (
    BOOKWORM,
    PIP_INDEX_VARIABLES,
    TRIXIE,
    Debian,
    Paths,
    build_environment,
    ca_bundle,
    debian_mirror,
    inherited_environment,
    pip_configuration,
)

CA_IN_BUILD = "/run/secrets/ca"
HOST_IN_ROOT = "/.host"
MOUNT_POINTS = ("dev", "proc", "sys")
DROPPED_FROM_BASE = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")


@dataclass(frozen=True, slots=True)
class Build:
    """One image to build.

    Attributes:
        context: folder that the Dockerfile copies from.
        dockerfile: the Dockerfile.
        tag: the image's name.
        arguments: build arguments.
        output: the docker-archive to write.
    """

    context: Path
    dockerfile: Path
    tag: str
    arguments: Mapping[str, str]
    output: Path

    @property
    def debian(self) -> Debian:
        """The Debian of the base image, by the build argument ``BASE``; trixie by default."""
        return BOOKWORM if self.arguments.get("BASE") == BOOKWORM.base_image else TRIXIE

    @property
    def ignore_file(self) -> Path:
        """The Dockerfile's own ignore file if it has one, else the context's."""
        own = self.dockerfile.with_name(self.dockerfile.name + ".dockerignore")
        return own if own.is_file() else self.context / ".dockerignore"

    def digest(self, builder: str) -> str:
        """A digest of everything that the image is made from."""
        files = {
            str(path.relative_to(self.context)): digests.digest_of({}, [path])
            for path in context_files(self.context, read_patterns(self.ignore_file))
        }
        values = {"tag": self.tag, "arguments": dict(self.arguments), "builder": builder, "files": files}
        return digests.digest_of({**values, "release": self.debian.point_release}, [self.dockerfile])


def build_image(build: Build, paths: Paths, progress: Progress, *, use_docker: bool) -> bool:
    """Build an image and write it as a docker-archive.

    Returns:
        False when nothing had to be done, because the output is there and no input changed.

    Raises:
        ClusterError: a file is missing or the build failed; carries the build's log.
    """
    for path in (build.context, build.dockerfile):
        if not path.exists():
            raise ClusterError(f"{path} is not there")
    name = "image-" + digests.digest_of({"tag": build.tag, "output": str(build.output.resolve())})[:16]
    with exclusive(paths, name, progress):
        return _build_changed(build, name, paths, progress, use_docker=use_docker)


def _build_changed(build: Build, name: str, paths: Paths, progress: Progress, *, use_docker: bool) -> bool:
    digest = build.digest("docker" if use_docker else "buildah")
    if build.output.exists() and digests.is_unchanged(paths, name, digest):
        progress.report(f"{build.tag}: unchanged, {build.output}")
        return False
    digests.forget(paths, name)
    builder: Buildah | Docker = Docker(paths) if use_docker else Buildah(paths)
    with exclusive(paths, f"base-image-{build.debian.suite}", progress):
        builder.ensure_base(build.debian, progress)
    build.output.parent.mkdir(parents=True, exist_ok=True)
    log = paths.logs / f"{name}.log"
    with progress.step(f"build the image {build.tag} (log: {log})"), _secrets() as secrets:
        builder.build(build, secrets, log)
    with progress.step(f"write {build.output}"):
        builder.export(build, log.with_suffix(".export.log"))
    digests.remember(paths, name, digest)
    return True


class Buildah:
    """The image builder of the Debian root file system, run as root in a mount namespace of its own."""

    def __init__(self, paths: Paths) -> None:
        require_root("building an image without Docker")
        self._paths = paths
        (paths.buildah / "tmp").mkdir(parents=True, exist_ok=True)

    def ensure_base(self, debian: Debian, progress: Progress) -> None:
        """Make the builder's root file system and, beside it, the base image; quick when both are there."""
        name = f"base-{debian.suite}"
        release = {"release": debian.point_release, "mirror": debian_mirror()}
        digest = digests.digest_of({"packages": BASE_IMAGE_PACKAGES, **release})
        archive = self._paths.images / f"{name}.tar"
        is_there = digests.is_unchanged(self._paths, name, digest)
        with ThreadPoolExecutor(1) as pool:
            builder = pool.submit(build_rootfs, self._paths, progress)
            if not is_there:
                with progress.step(f"make the base image {debian.base_image}"):
                    self._write_base(debian, archive, progress)
            builder.result()
        if not is_there:
            with progress.step(f"give the builder the base image {debian.base_image}"):
                log = self._paths.logs / f"{name}-pull.log"
                self._run("pull", "--quiet", f"docker-archive:{_in_root(archive)}", log=log)
            digests.remember(self._paths, name, digest)

    def _write_base(self, debian: Debian, archive: Path, progress: Progress) -> None:
        folder = self._paths.local / "base" / debian.suite
        log = self._paths.logs / f"debootstrap-{archive.stem}.log"
        debootstrap(self._paths, folder, debian, BASE_IMAGE_PACKAGES, log=log)
        report_if_newer(folder, debian, progress)
        for dropped in DROPPED_FROM_BASE:
            shutil.rmtree(folder / dropped, ignore_errors=True)
        # apt writes into these and does not make them.
        for needed in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial"):
            (folder / needed).mkdir(parents=True)
        # As in Debian's own image: a build that fails is thrown away, so that dpkg need not wait for the disk.
        (folder / "etc/dpkg/dpkg.cfg.d/docker-apt-speedup").write_text("force-unsafe-io\n")
        entries = [(entry.name, entry) for entry in sorted(folder.iterdir()) if entry.name not in MOUNT_POINTS]
        write_image(archive, tag=debian.base_image, files=entries, command=[])
        shutil.rmtree(folder)

    def build(self, build: Build, secrets: Mapping[str, Path], log: Path) -> None:
        """Build into the builder's storage. Layers whose inputs did not change are taken from there."""
        arguments = [f"--build-arg={name}={value}" for name, value in build.arguments.items()]
        arguments += [f"--secret=id={name},src={_in_root(path)}" for name, path in secrets.items()]
        if build.ignore_file.is_file():
            arguments.append(f"--ignorefile={_in_root(build.ignore_file)}")
        self._run(
            "build", "--isolation=chroot", "--network=host", "--layers", "--pull=false", f"--tag={build.tag}",
            f"--file={_in_root(build.dockerfile)}", *arguments, _in_root(build.context),
            log=log, advice="the log shows the step of the Dockerfile that failed",
        )  # fmt: skip

    def export(self, build: Build, log: Path) -> None:
        """Write the docker-archive."""
        partial = build.output.with_name(build.output.name + ".partial")
        partial.unlink(missing_ok=True)
        self._run("push", "--quiet", build.tag, f"docker-archive:{_in_root(partial)}:{build.tag}", log=log)
        partial.replace(build.output)

    def _run(self, *arguments: str, log: Path, advice: str = "") -> None:
        with tempfile.TemporaryDirectory(dir=self._paths.buildah / "tmp") as scratch:
            environment = build_environment() | {
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "ROOTFS": str(self._paths.rootfs),
                "SCRATCH": scratch,
                "SHELL_LIBRARY": str(SHELL / "root.sh"),
                "STORAGE": str(self._paths.buildah),
                # Blobs of images pass through here; the default would be in memory.
                "TMPDIR": "/var/lib/containers/tmp",
            }
            run_logged(
                in_own_namespaces(["sh", SHELL / "in_root.sh", "buildah", *arguments]),
                log=log,
                what=f"buildah {arguments[0]}",
                advice=advice,
                env=environment,
            )


class Docker:
    """Docker's own builder, for machines that have it."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def ensure_base(self, debian: Debian, progress: Progress) -> None:
        """Give Debian's image from the registry the name of the base image, unless it has it."""
        inspect = ["docker", "image", "inspect", debian.base_image]
        if subprocess.run(inspect, capture_output=True, check=False).returncode == 0:
            return
        with progress.step(f"pull {debian.registry_image} as the base image {debian.base_image}"):
            # Debian's image lacks packages of the base image made here.
            recipe = (
                f"FROM {debian.registry_image}\n"
                "RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates"
                " && rm -rf /var/lib/apt/lists/*\n"
            )
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "Dockerfile").write_text(recipe)
                log = self._paths.logs / "base-docker.log"
                run_logged(["docker", "build", "--tag", debian.base_image, folder], log=log, what="docker build")

    def build(self, build: Build, secrets: Mapping[str, Path], log: Path) -> None:
        """Build into Docker's storage."""
        arguments = [f"--build-arg={name}={value}" for name, value in build.arguments.items()]
        arguments += [f"--secret=id={name},src={path}" for name, path in secrets.items()]
        run_logged(
            ["docker", "build", "--network=host", f"--tag={build.tag}", f"--file={build.dockerfile}",
             *arguments, build.context],
            log=log, what="docker build", advice="the log shows the step of the Dockerfile that failed",
            env=inherited_environment() | {"DOCKER_BUILDKIT": "1"},
        )  # fmt: skip

    def export(self, build: Build, log: Path) -> None:
        """Write the docker-archive."""
        partial = build.output.with_name(build.output.name + ".partial")
        run_logged(["docker", "save", "--output", partial, build.tag], log=log, what="docker save")
        partial.replace(build.output)


def merged_pip_configuration(configuration: str, environment: Mapping[str, str], *, has_ca: bool) -> str:
    """The pip configuration for builds: the machine's, with its ``PIP_*`` index variables on top.

    Files that the machine's configuration names do not exist in a build, so local wheel folders are dropped and the
    certificate bundle becomes the one that the build mounts.
    """
    parsed = configparser.RawConfigParser()
    parsed.read_string(configuration)
    for section in parsed.sections():
        for option in ("cert", "client-cert", "find-links", "cache-dir", "log"):
            parsed.remove_option(section, option)
    if not parsed.has_section("global"):
        parsed.add_section("global")
    for variable in PIP_INDEX_VARIABLES:
        if variable in environment:
            option = variable.removeprefix("PIP_").lower().replace("_", "-")
            parsed.set("global", option, environment[variable])
    if has_ca:
        parsed.set("global", "cert", CA_IN_BUILD)
    text = io.StringIO()
    parsed.write(text)
    return text.getvalue()


@contextmanager
def _secrets() -> Iterator[dict[str, Path]]:
    """The build secrets as files that only their owner can read, for as long as the body runs."""
    configuration, authorities = pip_configuration(), ca_bundle()
    with tempfile.TemporaryDirectory() as folder:
        pip = Path(folder) / "pip.conf"
        pip.touch(mode=0o600)
        text = configuration.read_text() if configuration else ""
        pip.write_text(merged_pip_configuration(text, inherited_environment(), has_ca=authorities is not None))
        secrets = {"pip": pip}
        if authorities is not None:
            secrets["ca"] = authorities.resolve()
        yield secrets


def _in_root(path: Path) -> str:
    """Where a path of the host is seen from inside the root file system."""
    return f"{HOST_IN_ROOT}{path.resolve()}"

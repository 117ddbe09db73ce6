"""Push images to a registry, without Docker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.build import CRANE, build_binaries
from e2e.cluster.processes import run_logged
from e2e.cluster.progress import ClusterError, Progress
from e2e.cluster.settings import Paths

REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*")
EXAMPLE = "registry.example.com/team"


def check_registry(registry: str) -> None:
    """Refuse a text that is no beginning of an image's name.

    Raises:
        ClusterError: it is empty or has another form than `HOST[:PORT][/PATH]`.
    """
    if not registry:
        raise ClusterError("no registry is given", advice=f"name it: make push REGISTRY={EXAMPLE}")
    if not REGISTRY.fullmatch(registry):
        raise ClusterError(
            f"{registry!r} is no registry",
            advice=f"the form is HOST[:PORT][/PATH] in lower case, without https:// and without a slash at the end, "
            f"as in {EXAMPLE}",
        )


def push_archives(archives: Mapping[str, Path], paths: Paths, progress: Progress) -> None:
    """Push docker-archives, each to the name that it is listed under; layers that the registry has are not sent again.

    Credentials are those of `docker login`, in `~/.docker/config.json` or below `DOCKER_CONFIG`.

    Raises:
        ClusterError: a program could not be built, or the registry refused an image.
    """
    build_binaries(paths, progress, [CRANE])
    crane = paths.bin / CRANE.name
    for name, archive in archives.items():
        log = paths.logs / f"push-{archive.stem}.log"
        host = name.partition("/")[0]
        with progress.step(f"push {name} ({archive.stat().st_size >> 20} MiB, compressed on the way)"):
            run_logged(
                [crane, "push", archive, name],
                log=log,
                what=f"pushing {name}",
                advice=f"check the name and your rights; `docker login {host}` or `{crane} auth login {host} -u USER "
                "--password-stdin` stores credentials in ~/.docker/config.json",
            )
        progress.report(f"pushed {log.read_text().splitlines()[-1]}")

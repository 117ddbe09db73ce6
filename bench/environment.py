"""Programs to compare the product with, each in an environment of its own, pinned by hash."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import venv
from pathlib import Path

from e2e.cluster.progress import ClusterError, Progress

ROOT = Path(__file__).parents[1]
_MARK = "kvstrata-installed"


def install(name: str, progress: Progress) -> Path:
    """Return the environment with the packages of `requirements/bench-<name>.txt`; one that fits is left alone.

    Raises ClusterError when the installation fails.
    """
    lock = ROOT / "requirements" / f"bench-{name}.txt"
    directory = ROOT / ".local" / f"venv-bench-{name}"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    mark = directory / _MARK
    if mark.exists() and mark.read_text() == wanted:
        return directory
    with progress.step(f"install {name} into {directory.relative_to(ROOT)}"):
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=True, symlinks=True)
        command = [
            str(directory / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-compile", "--no-deps", "--require-hashes", "--requirement", str(lock),
        ]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"pip could not install {name}:\n{done.stdout[-2000:]}", advice="run it again")
        mark.write_text(wanted)
    return directory

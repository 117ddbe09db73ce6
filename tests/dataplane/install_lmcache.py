"""Create `.local/venv-lmcache`: the real LMCache server for tests, on a machine without a GPU.

    python tests/dataplane/install_lmcache.py             # the server alone: 1.5 GB, a minute
    python tests/dataplane/install_lmcache.py --engine    # `.local/venv-engine`: vLLM for CPUs too, 2.2 GB

Needs the standard library, and `gcc`, `nm` and `readelf` for the stand-ins for CUDA's libraries. Everything is pinned
by hash in `requirements/`. An environment that fits its lock is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUB_PROGRAM = ROOT / "e2e/engine/torch_stub.py"
MARK = "kvstrata-installed"


def main() -> None:
    """Install what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="install the engine too")
    parser.add_argument("--directory", type=Path, help="where (default: under .local)")
    arguments = parser.parse_args()
    name, lock = ("venv-engine", "engine-cpu.txt") if arguments.engine else ("venv-lmcache", "lmcache-server.txt")
    install(arguments.directory or ROOT / ".local" / name, ROOT / "requirements" / lock)


def install(directory: Path, lock: Path) -> None:
    """Make `directory` a virtual environment with exactly what `lock` names, unless it is one."""
    wanted = hashlib.sha256(lock.read_bytes() + STUB_PROGRAM.read_bytes()).hexdigest()
    mark = directory / MARK
    if mark.exists() and mark.read_text() == wanted:
        print(f"{directory} is up to date")
        return
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True, symlinks=True)
    python = str(directory / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--requirement", str(lock)], check=True)
    subprocess.run([python, str(STUB_PROGRAM)], check=True)
    mark.write_text(wanted)
    print(f"{directory} is ready")


if __name__ == "__main__":
    main()

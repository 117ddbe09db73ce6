"""Create `.local/venv-lmcache`: the real LMCache server for tests, on a machine without a GPU.

    python tests/dataplane/install_lmcache.py [DIRECTORY]

Needs the standard library, about 1.5 GB, a minute, and `gcc`, `nm` and `readelf` (for the stand-ins for CUDA's
libraries). Everything is pinned by hash in requirements/lmcache-server.txt. An environment that fits the lock is left
alone.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements/lmcache-server.txt"
STUB_PROGRAM = ROOT / "e2e/engine/torch_stub.py"
MARK = "kvstrata-installed"


def main() -> int:
    """Install unless it is installed."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".local/venv-lmcache"
    wanted = hashlib.sha256(LOCK.read_bytes() + STUB_PROGRAM.read_bytes()).hexdigest()
    mark = directory / MARK
    if mark.exists() and mark.read_text() == wanted:
        print(f"{directory} is up to date")
        return 0
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True, symlinks=True)
    python = str(directory / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--requirement", str(LOCK)], check=True)
    subprocess.run([python, str(STUB_PROGRAM)], check=True)
    mark.write_text(wanted)
    print(f"LMCache is ready in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

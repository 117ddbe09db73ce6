"""The installed LMCache and vLLM have every name that this version's modules need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.dataplane.engine_process import engine_python
from tests.dataplane.lmcache_server import ROOT, lmcache_python

pytestmark = pytest.mark.lmcache

PROGRAM = """
import sys
from kvstrata_sidecar.upstream.names import differences
from kvstrata_sidecar.upstream.v0_5_6 import needs
found = differences(getattr(needs, sys.argv[1]))
sys.exit("\\n".join(found) or None)
"""


@pytest.mark.parametrize(
    ("side", "python"),
    [("SERVER", lmcache_python()), ("CONNECTOR", engine_python()), ("RESET", engine_python())],
)
def test_the_installed_packages_have_all_needed_names(side: str, python: Path | None) -> None:
    if python is None:
        pytest.skip("not installed: see tests/dataplane/install_lmcache.py")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/operator/src:{ROOT}/sidecar/src"}
    subprocess.run([str(python), "-c", PROGRAM, side], env=environment, check=True)

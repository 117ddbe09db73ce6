"""Entry point of ``python3 -m e2e.cluster.netpol KUBECONFIG``."""

from __future__ import annotations

import sys
from pathlib import Path

from e2e.cluster.netpol.enforcer import run

run(Path(sys.argv[1]))

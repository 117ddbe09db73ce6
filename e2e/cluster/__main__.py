"""Entry point of ``python3 -m e2e.cluster``."""

from __future__ import annotations

import sys

from e2e.cluster.cli import main

sys.exit(main(sys.argv[1:]))

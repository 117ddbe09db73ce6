"""The operator, whose event loop stands still for a while when a test says so by SIGUSR1.

`KVSTRATA_TEST_STILL_S` says for how long, `KVSTRATA_TEST_SILENT_LIMIT_S` after how long its Lease is renewed no more.
"""

from __future__ import annotations

import os
import signal
import time

from kvstrata.cli.operator import main
from kvstrata.clients import lease

STILL_S = "KVSTRATA_TEST_STILL_S"
SILENT_LIMIT_S = "KVSTRATA_TEST_SILENT_LIMIT_S"


def _stand_still(*_: object) -> None:
    """Work without an end in sight, in the thread of the event loop."""
    ends = time.monotonic() + float(os.environ[STILL_S])
    while time.monotonic() < ends:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _stand_still)
    lease.SILENT_LIMIT_S = float(os.environ.get(SILENT_LIMIT_S, lease.SILENT_LIMIT_S))
    main()

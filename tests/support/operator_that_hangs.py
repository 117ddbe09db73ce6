"""The operator, whose event loop stands still for a while when a test says so by SIGUSR1.

SIGUSR2 ends it; `KVSTRATA_TEST_STILL_S` says after how long it ends in any case, `KVSTRATA_TEST_SILENT_LIMIT_S` after
how long the Lease is renewed no more. With `KVSTRATA_TEST_STAYS` a part of it ignores its
cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

from kvstrata.cli.operator import main
from kvstrata.clients import lease
from kvstrata.reconcile.erasure.key_rotation import KeyRotation

STILL_S = "KVSTRATA_TEST_STILL_S"
SILENT_LIMIT_S = "KVSTRATA_TEST_SILENT_LIMIT_S"
STAYS = "KVSTRATA_TEST_STAYS"


def _stand_still(*_: object) -> None:
    """Work without an end in sight, in the thread of the event loop."""
    ordered = list[int]()
    signal.signal(signal.SIGUSR2, lambda number, _: ordered.append(number))
    ends = time.monotonic() + float(os.environ[STILL_S])
    while not ordered and time.monotonic() < ends:
        pass


async def _stay(_: KeyRotation) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _stand_still)
    if STAYS in os.environ:
        KeyRotation.run = _stay  # type: ignore[method-assign]
    lease.SILENT_LIMIT_S = float(os.environ.get(SILENT_LIMIT_S, lease.SILENT_LIMIT_S))
    main()

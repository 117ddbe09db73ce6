"""The operator, whose event loop stops when a test sends SIGUSR1.

SIGUSR2 lets it continue, at the latest after `KVSTRATA_TEST_STILL_S`; `KVSTRATA_TEST_SILENT_LIMIT_S` is the time after
which the Lease is renewed no more. With `KVSTRATA_TEST_STAYS` a part of it ignores its cancellation.
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

"""`python -m kvstrata_sidecar.delete_job ORDER`: executes a JSON order, and reports on standard output.

Exit codes: 0 when complete, 3 when stopped for the reason in the last line (another run continues), 2 for a bad order.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kvstrata.contract.messages.erase_report import End, Line, Outcome, encode_line
from kvstrata_sidecar.delete_job.chunks import ChunkDeletion
from kvstrata_sidecar.delete_job.delete import Deletion
from kvstrata_sidecar.delete_job.order import Order
from kvstrata_sidecar.delete_job.reclaim import Reclaim
from kvstrata_sidecar.delete_job.servers import Servers, StoppedError

WHOLE, MALFORMED, STOPPED = 0, 2, 3


def main(arguments: list[str]) -> int:
    try:
        (path,) = arguments
        order = Order.from_json(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        print(f"the order cannot be read: {error}", file=sys.stderr)
        return MALFORMED
    try:
        servers = Servers(order.tier)
    except StoppedError as error:
        _print(End(Outcome.STOPPED, error.reason, str(error)[:512], None, 0))
        return STOPPED
    try:
        work = Reclaim if order.identities else ChunkDeletion if order.chunks else Deletion
        whole = work(order, servers, _print, clock=time.monotonic, sleep=time.sleep).run()
    finally:
        servers.close()
    return WHOLE if whole else STOPPED


def _print(line: Line) -> None:
    sys.stdout.buffer.write(encode_line(line))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

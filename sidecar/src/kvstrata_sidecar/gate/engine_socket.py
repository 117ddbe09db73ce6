"""The engine's socket file, which a crash leaves behind.

vLLM binds its socket without removing an old one, so after a crash the restarted container would fail with "address
already in use" for ever: the file outlives it in the pod's volume. The gate removes the file when no process of the
pod has it bound. That cannot hit an engine that starts: it cannot bind while the file exists.
"""

from __future__ import annotations

from pathlib import Path

from . import log

UNIX_SOCKETS = Path("/proc/net/unix")
"""The sockets of this network namespace, which all containers of a pod share."""


def remove_if_unbound(path: Path, table: Path = UNIX_SOCKETS) -> bool:
    """Remove the socket file unless a process has it bound; return whether it was removed.

    An engine that has bound but does not listen yet counts as bound. Does nothing when the table cannot be read.
    """
    if not path.is_socket():
        return False
    try:
        bound = {line.split(maxsplit=7)[7] for line in table.read_text().splitlines() if line.count(" /")}
    except (OSError, IndexError):
        return False
    if str(path) in bound:
        return False
    path.unlink(missing_ok=True)
    log.warning("removed the socket that a dead engine left behind")
    return True

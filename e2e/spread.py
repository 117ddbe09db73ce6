"""A pytest plugin for `make test`: how tests are spread over the workers of pytest-xdist.

A worker takes a whole file at a time. Files that share slow-starting parts count as one; long files that share nothing
are taken a test at a time.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER: tuple[tuple[str, ...], ...] = (
    ("tests/api/",),  # one API server
    tuple(  # one API server, and one operator that leads
        f"tests/apiserver/test_{name}" for name in ("memory_api", "operator", "receipts", "refused_children", "secrets")
    ),
    tuple(  # an engine takes 2 GB of memory
        f"tests/dataplane/test_{name}.py"
        for name in (
            "agents",
            "cache_server_ends",
            "engine_guard",
            "engine_loans",
            "equal_answers",
            "isolation_probe",
            "lookup_ends",
            "metrics_page",
            "pool_engine",
            "restore_or_recompute",
        )
    ),
)
"""How the paths begin of tests that one worker runs one after the other."""

APART = "tests/property/"
"""How the paths begin of tests that any worker runs. One of these files takes half an hour of one worker."""


class ByServers(LoadScopeScheduling):
    """Gives a worker the tests of one file, or of one element of TOGETHER, or one of APART."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        path = nodeid.partition("::")[0]
        return next((beginnings[0] for beginnings in TOGETHER if path.startswith(beginnings)), path)

    def remove_node(self, node: WorkerController) -> str | None:
        """Give other workers the remaining tests of a dead one, but for the test that it died of, which is returned.

        The scheduler of xdist gives them that one, too, and loses them all.
        """
        units = self.assigned_work.pop(node)
        left = [(unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done]
        if not left:
            return None
        unit, fatal = left[0]
        unit[fatal] = True
        self.workqueue.update((scope, unit) for scope, unit in units.items() if not all(unit.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return fatal


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServers:
    """Spread tests by the servers that they share."""
    return ByServers(config, log)

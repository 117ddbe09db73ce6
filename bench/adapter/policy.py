"""A gate for one process: writes a policy with data keys, and has the adapter enforce it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from kvstrata.contract.messages.adapter import SOCKET_NAME, AdapterAck, ApplyRequest, decode_answer, encode_request
from kvstrata.contract.policy.bundle import EnforcedBudget, Rules
from kvstrata.contract.policy.cache_view import FRESHNESS_FILE, FRESHNESS_FORMAT, POLICY_FILE, CacheView
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY, file_name

DOMAIN, IDENTITY = "d0" * 8, "1d" * 8
MAIN = "a" * 32
TIERS = ("plain", "sealed", "filling", "cluster")
LIMIT_BYTES = 1 << 40
"""A limit that is never reached, so that accounting and ledger do their work and nothing is evicted."""


class Policy:
    """Allows the main scope and any number of others."""

    def __init__(self, directory: Path) -> None:
        self._policy_dir, self._link_dir = directory / "policy", directory / "link"
        for folder in (self._policy_dir, self._link_dir, self._policy_dir / KEYS_DIRECTORY):
            folder.mkdir(exist_ok=True)
        self._revision = 0

    @property
    def directories(self) -> dict[str, str]:
        """The parameters that name them."""
        return {"policy_dir": str(self._policy_dir), "link_dir": str(self._link_dir)}

    def salts(self, scopes: int) -> list[str]:
        """Return the keyspaces of `scopes` scopes, the main one if it is one."""
        return [MAIN] if scopes == 1 else [f"{number:032x}" for number in range(1, scopes + 1)]

    def enforce(self, scopes: int) -> None:
        """Put the policy in force. Raises RuntimeError if the adapter does not acknowledge it."""
        self._revision += 1
        sent_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        (self._policy_dir / FRESHNESS_FILE).write_bytes(FRESHNESS_FORMAT.pack(sent_ns))
        names = [MAIN, *self.salts(max(2, scopes))]
        for name in names:
            path = self._policy_dir / KEYS_DIRECTORY / file_name(name, 0)
            if not path.exists():
                path.write_bytes(os.urandom(32))
        budgets = tuple(EnforcedBudget(tier, limit_bytes=LIMIT_BYTES) for tier in TIERS)
        view = CacheView(
            DOMAIN, self._revision, 1, Rules(stale_after_s=86_400, on_stale="ServeStale"),
            {name: budgets if name == MAIN else () for name in names},
            generations=dict.fromkeys(names, (0,)),
        )  # fmt: skip
        (self._policy_dir / POLICY_FILE).write_bytes(view.encode())
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self._link_dir / SOCKET_NAME))
            link.sendall(encode_request(ApplyRequest(self._revision, 1)))
            with link.makefile("rb") as lines:
                decode_answer(AdapterAck, lines.readline())

"""Real servers in networks of their own, to which anything happens: `e2e/chaos`, a few steps of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from e2e.cluster.settings import REPOSITORY
from tests.support import amounts
from tests.support.amounts import examples
from tests.support.redis_binary import needs_redis

pytestmark = [
    *needs_redis,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SEED = "2766"
"""Draws one pod unplugged; one unheard while a minority is apart; a fourth shard, a roll of four, three shards again; a
server frozen, and one killed. Other steps when the deck of faults changes."""
PATIENCE_S = examples(600)


def test_after_whatever_happens_each_slot_has_one_primary_and_no_request_took_longer_than_it_may() -> None:
    """How many steps KVSTRATA_CHAOS_STEPS says, 7 if it does not."""
    folders = ("operator/src", "sidecar/src", ".")
    path = os.pathsep.join(str(REPOSITORY / folder) for folder in folders)
    walk = subprocess.Popen(
        [sys.executable, "-m", "e2e.chaos", "--seed", str(amounts.SEED) if amounts.SOAK else SEED],
        cwd=REPOSITORY,
        env={"KVSTRATA_CHAOS_STEPS": str(examples(7)), **os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told, _ = walk.communicate(timeout=PATIENCE_S)
    finally:
        walk.kill()  # and with it all that it started
    assert walk.returncode == 0, told
    print(told)

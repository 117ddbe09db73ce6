"""During an upgrade each version reads messages of the other: bundles, manifests, erasures, records, receipts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import earlier

from .unread import unread

HERE = Path(__file__).parent
KNOWN_TO_BOTH = "79 read"


def test_messages_of_the_version_before_fingerprints_are_read() -> None:
    assert unread(earlier.code() / "tests/golden/wire/messages") == [KNOWN_TO_BOTH]


def test_the_version_before_fingerprints_reads_messages_of_this_one() -> None:
    command = [sys.executable, str(HERE / "unread.py"), str(HERE / "messages")]
    done = subprocess.run(
        command, cwd=earlier.code(), env=earlier.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [KNOWN_TO_BOTH]

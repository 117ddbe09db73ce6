"""Keyspaces in what a process prints and logs, in a process of its own: streams and loggers are replaced for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KEYSPACE = "0123456789abcdef" * 2
SHOWN = KEYSPACE[:12]

PROGRAM = """
import logging, sys, threading, warnings
early = logging.getLogger("early")
early.addHandler(logging.StreamHandler())
early.propagate = False
logging.basicConfig(filename=sys.argv[2], level=logging.DEBUG)
from kvstrata_sidecar.output import shorten_keyspaces
shorten_keyspaces()
shorten_keyspaces()
keyspace = sys.argv[1]
late = logging.getLogger("late")
late.propagate = False
late.addHandler(logging.StreamHandler(sys.stdout))
for logger in (early, late, logging.getLogger("file")):
    logger.warning("key %s of %s: %r", keyspace, {"salt": keyspace}, keyspace.encode())
    logger.error("%d%% of %s", 7, "short abcdef0123456789")
    try:
        raise KeyError(f"@{keyspace}@")
    except KeyError:
        logger.exception("failed")
print("hash", keyspace * 2, keyspace.encode().hex(), file=sys.stderr)
warnings.warn(keyspace)
thread = threading.Thread(target=lambda: 1 / 0, name=keyspace)
thread.start()
thread.join()
raise RuntimeError(keyspace)
"""


def test_no_line_has_more_than_the_first_digits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", PROGRAM, KEYSPACE, str(log)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    printed = [ended.stdout, ended.stderr, log.read_text()]
    for text in printed:
        assert KEYSPACE[12:] not in text
        assert f"key {SHOWN} of {{'salt': '{SHOWN}'}}: b'{SHOWN}'" in text
        assert f"KeyError: '@{SHOWN}@'" in text
        assert "7% of short abcdef0123456789" in text
    assert f"hash {SHOWN} {KEYSPACE.encode().hex()[:12]}\n" in ended.stderr
    assert f"RuntimeError: {SHOWN}\n" in ended.stderr
    assert f"UserWarning: {SHOWN}" in ended.stderr
    assert f"Exception in thread {SHOWN}" in ended.stderr

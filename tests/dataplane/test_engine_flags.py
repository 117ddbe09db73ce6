"""Every flag of the engine is refused by the API or judged harmless: a new version's flags do not pass unseen.

Needs vLLM for CPUs: `python tests/dataplane/install_lmcache.py --engine`, or KVSTRATA_ENGINE_PYTHON.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvstrata.api.engine_flags import OWNED_FLAGS, owned_flag
from kvstrata.objects.pod.identity import SHORT_FLAGS
from tests.dataplane.engine_process import engine_python

pytestmark = [pytest.mark.lmcache]

JUDGED = Path(__file__).with_name("judged_flags.txt")
"""Flags of vLLM 0.32 that let no caller around the gate, connect no cache and change no name of a block, one a line."""

PROGRAM = """
import json
from vllm.entrypoints.launchers.cli_args import create_parser_for_docs
found = {name: one.help or "" for one in create_parser_for_docs()._actions for name in one.option_strings}
print(json.dumps({name: text for name, text in found.items() if "--" + name.removeprefix("--no-") not in found}))
"""


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    """The engine's flags, and their help texts."""
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    ended = subprocess.run([python, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def judged() -> set[str]:
    return {line for line in JUDGED.read_text().splitlines() if line and not line.startswith("#")}


def test_no_flag_of_the_engine_is_unjudged(flags: dict[str, str]) -> None:
    unjudged = {flag: text for flag, text in flags.items() if owned_flag(flag) is None and flag not in judged()}
    assert unjudged == {}, "add each to engine_flags.py, with its remedy, or to judged_flags.txt"


def test_no_judged_flag_is_refused_or_gone(flags: dict[str, str]) -> None:
    assert judged() & OWNED_FLAGS.keys() == set()
    assert judged() - flags.keys() == set()


def test_short_flags_of_the_identity_are_those_of_the_engine(flags: dict[str, str]) -> None:
    assert SHORT_FLAGS.keys() - flags.keys() == set()

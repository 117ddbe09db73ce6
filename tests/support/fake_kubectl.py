"""Stands in for kubectl, which needs a cluster: answers by the first words of its arguments that match."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """#!{python}
import json, sys
arguments = [one for one in sys.argv[1:] if not one.startswith(("--namespace", "--context", "--kubeconfig"))]
line = " ".join(arguments)
for beginning, answer in json.load(open({answers!r})).items():
    if line.startswith(beginning):
        if answer.get("error"):
            sys.stderr.write(answer["error"])
            sys.exit(1)
        sys.stdout.write(answer["text"])
        sys.exit(0)
sys.stderr.write("Error from server (NotFound): " + line)
sys.exit(1)
"""


class Refused(str):
    """A message on kubectl's standard error."""


def put(folder: Path, patch: pytest.MonkeyPatch, answers: Mapping[str, Any]) -> None:
    """Make `kubectl` answer: an object as JSON, a text as it is, Refused with exit code 1."""
    known = {}
    for beginning, answer in answers.items():
        if isinstance(answer, Refused):
            known[beginning] = {"error": answer}
        else:
            known[beginning] = {"text": answer if isinstance(answer, str) else json.dumps(answer)}
    (folder / "answers.json").write_text(json.dumps(known))
    program = folder / "kubectl"
    program.write_text(PROGRAM.format(python=sys.executable, answers=str(folder / "answers.json")))
    program.chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=":")

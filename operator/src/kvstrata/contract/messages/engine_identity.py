"""The resolved part of a model's cache identity, as its engine reports it.

The engine's connector computes a fingerprint of the model's files, the libraries and the configuration in force before
its first lookup or store. It writes `EngineIdentity` to `IDENTITY_FILE` beside the engine's socket, for the gate, and
appends the fingerprint to the model's name in LMCache's keys. So the cache server has it from every key, and blocks of
other fingerprints are other blocks in every tier, its own memory included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Annotated

from kvstrata.contract.wire import Form, Message, shown, wired

IDENTITY_FILE = "identity.json"
MAX_IDENTITY_BYTES = 16_384
MAX_PROBLEM_CHARACTERS = 256
MAX_FACTS = 32
MAX_FACT_CHARACTERS = 128

UNRESOLVED = "f" * 16
"""Stands for the fingerprint of an engine that has none: no block has it in its name."""

UNGOVERNED = "ungoverned"
NO_FINGERPRINT = "no_fingerprint"
"""Reasons why a pod serves without reuse, as in the audit log: an LMCache that cannot be governed, or any other."""

Fingerprint = Annotated[str, Form("([0-9a-f]{16})?", "fingerprint of 16 hexadecimal digits")]
"""Empty if there is none."""

_MARK = "#"


@wired("an engine's identity", versioned=True)
class EngineIdentity(Message):
    """`facts` are the inputs of the fingerprint, by name; without a fingerprint `problem` is the reason. `ungoverned`:
    because its LMCache has a version that cannot be governed."""

    fingerprint: Fingerprint = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    ungoverned: bool = False

    def __post_init__(self) -> None:
        facts = {shown(name, 32): shown(fact, MAX_FACT_CHARACTERS) for name, fact in sorted(self.facts.items())}
        object.__setattr__(self, "facts", dict(list(facts.items())[:MAX_FACTS]))
        object.__setattr__(self, "problem", shown(self.problem, MAX_PROBLEM_CHARACTERS))


def marked(model_name: str, fingerprint: str) -> str:
    """Return the model's name in LMCache's keys. LMCache allows any character in it but `@`."""
    return f"{model_name}{_MARK}{fingerprint}"


@lru_cache(maxsize=256)
def fingerprint_in(model_name: str) -> str:
    """Return the fingerprint in a key's model name, `UNRESOLVED` for a name without one."""
    fingerprint = model_name.rpartition(_MARK)[2]
    known = len(fingerprint) == len(UNRESOLVED) and not set(fingerprint).difference("0123456789abcdef")
    return fingerprint if known and _MARK in model_name else UNRESOLVED

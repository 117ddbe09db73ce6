"""Requests to pods: chunks of prefixes and isolation probes. Answers are facts of a later plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.model.pods import Pod


@dataclass(frozen=True, slots=True)
class ReadSource:
    name: str
    key: str


@dataclass(frozen=True, slots=True)
class RenderPool:
    """Ask a pod to name the chunks of prefixes, one after the other. `pool` is the object that is planned again with
    the answers, of kind `asker` (a pool or an invalidation)."""

    pool: str
    pod: Pod
    prefixes: tuple[PrefixSource, ...] = field(repr=False)
    asker: str = "PrefixPool"


@dataclass(frozen=True, slots=True)
class WarmPool:
    """Have a pod compute prefixes of a pool's version, one after the other.

    The version's keyspace begins with `scope`, and `manifest` is its digest. `timeout_s` is per prefix, and `at_once`
    limits concurrent computations of all the model's pods, for any pool.
    """

    pool: str
    pool_uid: str
    pod: Pod
    scope: str
    manifest: str
    prefixes: tuple[PrefixSource, ...] = field(repr=False)
    timeout_s: float = 600.0
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class InspectPool:
    pool: str
    pool_uid: str
    pod: Pod


@dataclass(frozen=True, slots=True)
class ProbePod:
    """Have a pod probe isolation under `revision` or a later one, in at most `readers` foreign scopes. `keyspaces` is a
    digest of those in that revision's bundle."""

    model: str
    pod: Pod
    revision: int
    keyspaces: str
    readers: int


@dataclass(frozen=True, slots=True)
class TellIsolation:
    """Export whether an isolation failure stands as a metric."""

    model: str
    failed: bool


PoolQuestion = ReadSource | RenderPool | WarmPool | InspectPool
IsolationQuestion = ProbePod | TellIsolation

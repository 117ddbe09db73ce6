"""What plans have pods asked: chunks of prefixes, and whether isolation holds. Answers are facts of a later plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.model.pods import Pod


@dataclass(frozen=True, slots=True)
class ReadSource:
    """Read a key of a ConfigMap that holds a prefix."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class RenderPool:
    """Ask a pod to name the chunks of a pool's prefixes, one after the other.

    `pool` is the name of the object that is planned again with the answers, of kind `asker`: pools ask, and
    invalidations of a prefix.
    """

    pool: str
    pod: Pod
    prefixes: tuple[PrefixSource, ...] = field(repr=False)
    asker: str = "PrefixPool"


@dataclass(frozen=True, slots=True)
class WarmPool:
    """Have a pod compute prefixes of a version of a pool, one after the other.

    The version is the one whose keyspace begins with `scope` and whose manifest has this digest. `timeout_s` is for
    each prefix, and `at_once` how many a model's pods compute at one time, of whichever pool.
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
    """Ask a pod what its tiers hold of a pool."""

    pool: str
    pool_uid: str
    pod: Pod


@dataclass(frozen=True, slots=True)
class ProbePod:
    """Have a pod probe isolation under `revision` or a later one, in at most `readers` foreign scopes.

    `keyspaces` is a digest of those that the bundle of that revision allows.
    """

    model: str
    pod: Pod
    revision: int
    keyspaces: str
    readers: int


@dataclass(frozen=True, slots=True)
class TellIsolation:
    """Show by a metric whether a failure of a model's isolation stands."""

    model: str
    failed: bool


PoolQuestion = ReadSource | RenderPool | WarmPool | InspectPool
IsolationQuestion = ProbePod | TellIsolation

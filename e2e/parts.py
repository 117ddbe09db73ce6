"""The parts of `make test-all`, and the record of their results in the repository."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster.digests import digest_of
from e2e.cluster.settings import REPOSITORY

RECORD = REPOSITORY / "tests" / "record.json"
"""The last result of each part."""

STORIES = "e2e/scenarios"
TESTED = ("charts", "crds", "e2e", "manifests", "operator", "pyproject.toml", "requirements", "sidecar", "tests")
"""The files that decide a part's result. A change of any of them makes it old."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the tests, which take half an hour at most.

    Attributes:
        paths: files and folders below the repository's root; stories and other tests are in different parts. Patches
            are planted (`e2e/defects.py`).
    """

    name: str
    purpose: str
    paths: tuple[str, ...]

    @property
    def is_story(self) -> bool:
        """Whether its tests need the local cluster."""
        return any(path.startswith(STORIES) for path in self.paths)

    @property
    def plants(self) -> bool:
        """Whether its files are planted defects."""
        return all(path.endswith(".patch") for path in self.paths)


@dataclass(frozen=True, slots=True)
class Result:
    """How a part ended last.

    Attributes:
        tree: a digest of all that decides the result.
        date: the day, as YYYY-MM-DD.
    """

    tree: str
    date: str
    passed: int
    failed: tuple[str, ...]
    minutes: float
    processor_seconds: int


def _stories(*names: str) -> tuple[str, ...]:
    return tuple(f"{STORIES}/test_{name}.py" for name in names)


_NAMED_STORIES = (
    Part("clusters", "managed clusters of Redis and Valkey in pods", _stories("managed_cluster", "cluster_servers")),
    Part(
        "faults",
        "parts that die, hang and are cut off while requests run, and a rolling update",
        _stories(
            "api_server_away", "cache_faults", "gate_cut_off", "operator_faults", "redis_faults", "rolling_update"
        ),
    ),
    Part(
        "pools",
        "shared prefixes under faults, and the tiers of one pod",
        _stories("engine_on_cluster", "hierarchy", "pool_changes", "pool_faults", "pool_room", "prefix_pools"),
    ),
)


def _others(folder: str, pattern: str, named: Iterable[Part]) -> tuple[str, ...]:
    """Return the tests of a folder that no named part has."""
    taken = {path for part in named for path in part.paths}
    found = (
        path for path in sorted((REPOSITORY / folder).glob(pattern)) if path.is_file() or any(path.rglob("test_*.py"))
    )
    names = (path.relative_to(REPOSITORY).as_posix() for path in found)
    return tuple(name for name in names if name not in taken)


def _patches(pattern: str) -> tuple[str, ...]:
    return tuple(path.relative_to(REPOSITORY).as_posix() for path in sorted(REPOSITORY.glob(pattern)))


_NAMED_TESTS = (
    Part("apiserver", "the operator against a real API server that misbehaves", ("tests/apiserver",)),
    Part("dataplane", "LMCache and engines, which die, hang and run out of memory", ("tests/dataplane",)),
    Part("topology", "clusters of every kind of server under faults and in any history", ("tests/topology",)),
    Part("tiers", "tiers on every kind of server", ("tests/tiers",)),
)
PARTS = (
    *_NAMED_TESTS,
    Part("others", "deaths at every write, and all other folders of tests", _others("tests", "[a-z]*/", _NAMED_TESTS)),
    *_NAMED_STORIES,
    Part("tenants", "all other stories", _others(STORIES, "test_*.py", _NAMED_STORIES)),
    Part("defects", "planted defects, each of which turns a test red", _patches("tests/*/defects/*.patch")),
    Part(
        "tenant-defects",
        "planted defects, each of which turns a story of tenants red",
        _patches(f"{STORIES}/defects/tenants/*.patch"),
    ),
    Part(
        "fault-defects",
        "planted defects, each of which turns a story of faults or pools red",
        _patches(f"{STORIES}/defects/faults/*.patch"),
    ),
    Part(
        "cluster-defects",
        "planted defects, each of which turns a story of clusters red",
        _patches(f"{STORIES}/defects/clusters/*.patch"),
    ),
)


def tree() -> str:
    """Return a digest of all that decides the results, as it is in the work tree."""
    listed = subprocess.run(
        ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *TESTED),
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = [REPOSITORY / name for name in sorted(set(listed.stdout.split("\0")) - {""})]
    names = {str(path): digest_of({}, [path]) for path in files if path.is_file() and path != RECORD}
    return digest_of(names)[:16]


def last_results(path: Path = RECORD) -> dict[str, Result]:
    """Return the record, by the names of parts."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: Result(**{**row, "failed": tuple(row["failed"])}) for name, row in rows.items()}


def keep(results: Mapping[str, Result], path: Path = RECORD) -> None:
    """Write the record, in the order of the parts."""
    rows = {part.name: asdict(results[part.name]) for part in PARTS if part.name in results}
    path.write_text(json.dumps(rows, indent=1) + "\n")

"""Which versions of LMCache are governed, and by what names a changed package is told from a known one."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstrata_sidecar.upstream import versions
from kvstrata_sidecar.upstream.names import differences
from kvstrata_sidecar.upstream.v0_5_6 import needs

ROOT = Path(__file__).parents[3]


def synchronized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as LMCache does: without `functools.wraps`."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapper


class Base:
    def __init__(self) -> None:
        self.inherited = 0


class Manager(Base):
    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[str, int] = {}

    def delete(self, keys: list[str], force: bool = False) -> None: ...

    @synchronized
    def reserve(self, keys: list[str]) -> None: ...


@dataclass
class Entry:
    lock: int
    memory: int


@dataclass(frozen=True)
class Frozen:
    name: str


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("fake_lmcache")
    module.Manager, module.Entry, module.Frozen = Manager, Entry, Frozen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_lmcache", module)
    return module


@pytest.mark.parametrize(
    "need",
    [
        "fake_lmcache:Manager.delete",
        "fake_lmcache:Manager.delete(keys, force)",
        "fake_lmcache:Manager.reserve(keys)",
        "fake_lmcache:Manager#_objects",
        "fake_lmcache:Manager#inherited",
        "fake_lmcache:Entry{memory, lock}",
        "fake_lmcache:Frozen#name",
    ],
)
def test_a_need_that_is_met_is_no_difference(need: str) -> None:
    assert differences([need]) == []


@pytest.mark.parametrize(
    ("need", "difference"),
    [
        ("fake_lmcache.gone:Manager", "fake_lmcache.gone cannot be imported"),
        ("fake_lmcache:Manager.clear", "fake_lmcache has no Manager.clear"),
        (
            "fake_lmcache:Manager.delete(keys)",
            "fake_lmcache:Manager.delete has the parameters (keys, force), not (keys)",
        ),
        ("fake_lmcache:Manager.reserve(keys, tag)", "has the parameters (keys), not (keys, tag)"),
        ("fake_lmcache:Manager#_staging", "fake_lmcache:Manager sets no _staging"),
        ("fake_lmcache:Frozen#memory", "fake_lmcache:Frozen sets no memory"),
        ("fake_lmcache:Entry{memory}", "fake_lmcache:Entry has the members (lock, memory), not (memory)"),
    ],
)
def test_a_difference_is_named(need: str, difference: str) -> None:
    (found,) = differences([need])
    assert difference in found


def test_needs_are_well_formed() -> None:
    """With the package away each is a difference, and a malformed one an error."""
    wanted = {need for need in (*needs.SERVER, *needs.CONNECTOR) if need.startswith("lmcache.")}
    assert len(differences(wanted)) == len(wanted)


@pytest.mark.parametrize("version", ["0.5.5", "0.5.7", "0.5.60", "0.5.6rc1", "0.6.0"])
def test_a_version_that_is_not_governed_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(versions.UngovernedVersionError, match=f"LMCache {re.escape(version)} is none of .*0.5.6"):
        versions.load(versions.SERVER)


@pytest.mark.parametrize("version", ["0.5.6", "0.5.6+cu13", "0.5.6.post1"])
def test_a_build_of_a_governed_version_with_other_names_is_not_governed(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.setattr(needs, "SERVER", ("fake_lmcache:Manager#_staging",))
    with pytest.raises(versions.UngovernedVersionError, match=r"differs .*: fake_lmcache:Manager sets no _staging"):
        versions.load(versions.SERVER)


def test_a_build_of_a_governed_version_with_its_names_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ModuleType("chosen")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.6+cu13")
    monkeypatch.setattr(needs, "SERVER", ("fake_lmcache:Manager#_objects",))
    monkeypatch.setitem(sys.modules, "kvstrata_sidecar.upstream.v0_5_6.server", chosen)
    assert versions.load(versions.SERVER) is chosen


def test_the_table_of_versions_names_the_governed_ones() -> None:
    page = (ROOT / "docs/reference/lmcache-versions.md").read_text()
    rows = dict(re.findall(r"^\| (\d+\.\d+\.\d+) \| (\w+)", page, re.M))
    assert {version for version, governed in rows.items() if governed == "yes"} == versions.GOVERNED.keys()

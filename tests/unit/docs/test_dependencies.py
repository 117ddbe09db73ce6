"""What is imported is declared, locked and explained; what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
OPERATOR, SIDECAR = REPOSITORY / "operator/src/kvstrata", REPOSITORY / "sidecar/src/kvstrata_sidecar"
OURS = {"kvstrata", "kvstrata_sidecar", "e2e", "bench", "tests", "tools"}
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "pythonjsonlogger": "python-json-logger",
    "yaml": "pyyaml",
}
"""Where a package is not imported by its distribution's name."""
BROUGHT = {"operator": {"yarl": "aiohttp", "pydantic_core": "pydantic"}}
"""Imported although another distribution brings it, by the one that does."""


def imported(*folders: Path) -> dict[str, Path]:
    """Return the distributions that modules below `folders` import, each with one of these modules."""
    found: dict[str, Path] = {}
    modules = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert len(modules) >= 4 * len(folders)
    for path in modules:
        for name in _roots(ast.parse(path.read_text())):
            if name not in sys.stdlib_module_names and name not in OURS:
                found.setdefault(DISTRIBUTIONS.get(name, name), path)
    return found


def _roots(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def declared(extra: str) -> set[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {re.split(r"[<>=!~ \[]", text)[0] for text in project["optional-dependencies"][extra]}


@pytest.mark.parametrize(
    ("extra", "folders"), [("operator", (OPERATOR,)), ("gate", (SIDECAR / "gate", SIDECAR / "delete_job"))]
)
def test_an_image_installs_what_its_program_imports_and_nothing_else(extra: str, folders: tuple[Path, ...]) -> None:
    brought = BROUGHT.get(extra, {})
    found = imported(*folders).keys() - brought.keys()
    assert found == declared(extra)
    assert set(brought.values()) <= declared(extra)
    locked = (REPOSITORY / "requirements" / f"{extra}.txt").read_text()
    assert all(f"\n{name.replace('_', '-')}==" in locked for name in found | brought.keys())


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        (OPERATOR / "contract", set()),
        (SIDECAR / "adapter", {"cryptography"}),
        (SIDECAR / "connector", set()),
        (SIDECAR / "upstream", {"huggingface_hub", "lmcache", "vllm", "opentelemetry"}),
    ],
)
def test_what_runs_in_other_peoples_images_imports_what_these_have(folder: Path, allowed: set[str]) -> None:
    assert imported(folder).keys() <= allowed


def test_each_dependency_has_a_line_that_says_why() -> None:
    page = (REPOSITORY / "docs/development/dependencies.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", page, re.M)
    named = {name.strip() for row in rows for name in re.sub(r"\([^)]*\)", "", row).split(",")}
    for extra in ("operator", "gate", "plugin", "dev"):
        assert declared(extra) <= named, declared(extra) - named
    pinned = [path.read_text() for path in sorted((REPOSITORY / "requirements").glob("bench-*.in"))]
    assert len(pinned) == 4
    for name in re.findall(r"^([\w-]+)(?:\[\w+\])?==", "\n".join(pinned), re.M):
        assert name in named, name


PROGRAMS = {
    "import-linter", "mypy", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "ruff", "types-PyYAML", "uv",
    "vulture",
}  # fmt: skip
"""What development needs and nothing imports."""


def test_what_development_declares_is_imported_or_a_program() -> None:
    found = imported(*(REPOSITORY / folder for folder in ("tests", "e2e", "bench", "tools"))).keys()
    assert declared("dev") <= found | PROGRAMS, declared("dev") - found - PROGRAMS

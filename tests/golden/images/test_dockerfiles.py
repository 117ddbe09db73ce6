"""What every image promises, read from its Dockerfile: pinned inputs, an unprivileged user, nothing of the builder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from e2e.cluster.ignorefile import context_files, read_patterns
from e2e.cluster.settings import REPOSITORY
from e2e.images.catalogue import IMAGES, Image, select

LOCK_FILES = sorted((REPOSITORY / "requirements").glob("*.txt"))
ADDRESS = re.compile(r"https?://|--(?:extra-)?index-url|--find-links|(?<![\w.])/(?:home|root|tmp|work|usr)/")
USER = "65532:65532"

images = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
lock_files = pytest.mark.parametrize("path", LOCK_FILES, ids=lambda path: path.name)


def instructions(image: Image) -> list[str]:
    """The Dockerfile's instructions, continuation lines joined and comments left out."""
    text = (REPOSITORY / image.dockerfile).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def copied_sources(image: Image) -> list[str]:
    words = [line.split()[1:] for line in instructions(image) if line.startswith("COPY ")]
    return [source for arguments in words if not arguments[0].startswith("--from") for source in arguments[:-1]]


@images
def test_the_last_user_is_the_unprivileged_one(image: Image) -> None:
    users = [line.split()[1] for line in instructions(image) if line.startswith("USER ")]
    assert users == [USER]


@images
def test_packages_come_with_hashes_or_not_from_an_index_at_all(image: Image) -> None:
    installs = re.findall(r"pip (?:install|wheel) [^&|]*", "\n".join(instructions(image)))
    for command in installs:
        assert "--require-hashes" in command or "--no-index" in command, command


@images
def test_how_the_builder_reaches_its_index_is_an_optional_secret(image: Image) -> None:
    for line in instructions(image):
        if "--require-hashes" in line:
            assert "--mount=type=secret,id=pip,required=false" in line
            assert "--mount=type=secret,id=ca,required=false" in line
        assert not line.startswith("ENV ") or "PIP_" not in line


@images
def test_the_base_image_can_be_chosen(image: Image) -> None:
    lines = instructions(image)
    assert lines[0] == "ARG BASE=debian:bookworm-slim"
    assert all(line.split()[1] == "${BASE}" for line in lines if line.startswith("FROM "))


@images
def test_its_ignore_file_lets_in_what_it_copies_and_nothing_else(image: Image) -> None:
    ignore_file = REPOSITORY / f"{image.dockerfile}.dockerignore"
    admitted = {str(path.relative_to(REPOSITORY)) for path in context_files(REPOSITORY, read_patterns(ignore_file))}
    sources = copied_sources(image)
    for source in sources:
        if (REPOSITORY / source).exists():
            assert any(name == source or name.startswith(f"{source}/") for name in admitted), source
    for name in admitted:
        assert any(name == source or name.startswith(f"{source}/") for source in sources), name


def test_the_sidecar_image_holds_no_module_of_the_operator_but_the_contract() -> None:
    (sidecar,) = select(["sidecar"])
    from_operator = {source for source in copied_sources(sidecar) if source.startswith("operator/")}
    assert from_operator == {"operator/src/kvstrata/__init__.py", "operator/src/kvstrata/contract"}


@lock_files
def test_every_pin_is_exact_and_has_a_hash(path: Path) -> None:
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).strip())
    assert entries
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry


@lock_files
def test_lock_files_hold_neither_addresses_nor_paths_of_a_machine(path: Path) -> None:
    assert not ADDRESS.search(path.read_text())


def test_every_dependency_has_a_reason() -> None:
    reasons = (REPOSITORY / "docs/dependencies.md").read_text().lower()
    for name in ("operator", "gate", "dev"):
        pins = re.findall(r"^([A-Za-z0-9._-]+)==", (REPOSITORY / f"requirements/{name}.txt").read_text(), re.MULTILINE)
        direct_or_indirect = pins if name != "dev" else direct_dependencies("dev")
        for pin in direct_or_indirect:
            assert re.search(rf"\b{re.escape(pin.lower())}\b", reasons), f"{pin} of {name}.txt"


def direct_dependencies(extra: str) -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=!~ \[]", text)[0] for text in project["optional-dependencies"][extra]]


def test_an_unknown_image_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no image gpu; there are operator, sidecar, redis, engine-cpu"):
        select(["gpu"])

"""What every image promises, read from its Dockerfile: pinned inputs, an unprivileged user, nothing of the builder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from e2e.cluster.ignorefile import context_files, read_patterns
from e2e.cluster.settings import BOOKWORM, REPOSITORY, TRIXIE, Debian
from e2e.images.catalogue import IMAGES, Image, select
from tests.tiers.server_kinds import KINDS

DOCKERFILES = sorted({image.dockerfile for image in IMAGES} | {"e2e/images/server/Dockerfile"})
DECISIVE = re.compile(r"(python3|python3-venv|gcc|[a-z]+-(server|tools))\b(?!-)")
LOCK_FILES = sorted((REPOSITORY / "requirements").glob("*.txt"))
ADDRESS = re.compile(r"https?://|--(?:extra-)?index-url|--find-links|(?<![\w.])/(?:home|root|tmp|work|usr)/")
USER = "65532:65532"

images = pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
dockerfiles = pytest.mark.parametrize("path", DOCKERFILES)
lock_files = pytest.mark.parametrize("path", LOCK_FILES, ids=lambda path: path.name)


def instructions(dockerfile: str) -> list[str]:
    """The Dockerfile's instructions, continuation lines joined and comments left out."""
    text = (REPOSITORY / dockerfile).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def copied_sources(image: Image) -> list[str]:
    words = [line.split()[1:] for line in instructions(image.dockerfile) if line.startswith("COPY ")]
    return [source for arguments in words if not arguments[0].startswith("--from") for source in arguments[:-1]]


@images
def test_the_last_user_is_the_unprivileged_one(image: Image) -> None:
    users = [line.split()[1] for line in instructions(image.dockerfile) if line.startswith("USER ")]
    assert users == [USER]


@images
def test_packages_come_with_hashes_or_not_from_an_index_at_all(image: Image) -> None:
    installs = re.findall(r"pip (?:install|wheel) [^&|]*", "\n".join(instructions(image.dockerfile)))
    for command in installs:
        assert "--require-hashes" in command or "--no-index" in command, command


@images
def test_how_the_builder_reaches_its_index_is_an_optional_secret(image: Image) -> None:
    for line in instructions(image.dockerfile):
        if "--require-hashes" in line:
            assert "--mount=type=secret,id=pip,required=false" in line
            assert "--mount=type=secret,id=ca,required=false" in line
        assert not line.startswith("ENV ") or "PIP_" not in line


@dockerfiles
def test_the_base_image_can_be_chosen_and_is_a_digest_by_default(path: str) -> None:
    lines = instructions(path)
    assert lines[0] == f"ARG BASE={TRIXIE.registry_image}"
    assert all(line.split()[1] == "${BASE}" for line in lines if line.startswith("FROM "))


@pytest.mark.parametrize("debian", [BOOKWORM, TRIXIE], ids=lambda debian: debian.suite)
def test_a_base_image_of_a_registry_has_a_date_and_a_digest(debian: Debian) -> None:
    assert re.fullmatch(rf"debian:{debian.suite}-\d{{8}}-slim@sha256:[0-9a-f]{{64}}", debian.registry_image)


@dockerfiles
def test_what_decides_which_program_runs_has_a_version(path: str) -> None:
    """The upstream version: Debian's own fixes of it come in."""
    installs = re.findall(r"apt-get install (.*?) > /dev/null", "\n".join(instructions(path)))
    packages = [word.strip("\"'") for words in installs for word in words.split() if not word.startswith("-")]
    decisive = [package for package in packages if DECISIVE.match(package)]
    assert decisive
    for package in decisive:
        assert re.search(r"=(\$\{VERSION\}|(\d+:)?[\d.]+\.\*)$", package), package


@pytest.mark.parametrize(("name", "version"), [("redis", "5:8.0.*"), ("valkey", "8.1.*"), ("redis-7", "5:7.0.*")])
def test_the_version_of_a_server_is_that_which_tests_say(name: str, version: str) -> None:
    (image,) = select([name])
    (default,) = re.findall(r"^ARG VERSION=(\S+)", (REPOSITORY / image.dockerfile).read_text(), re.MULTILINE)
    assert image.arguments.get("VERSION", default) == version
    (kind,) = [kind for kind in KINDS if kind.image == name]
    assert kind.name.partition("-")[2] == version.rpartition(":")[2].removesuffix(".*")


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
    reasons = (REPOSITORY / "docs/development/dependencies.md").read_text().lower()
    for name in ("operator", "gate", "dev"):
        pins = re.findall(r"^([A-Za-z0-9._-]+)==", (REPOSITORY / f"requirements/{name}.txt").read_text(), re.MULTILINE)
        direct_or_indirect = pins if name != "dev" else direct_dependencies("dev")
        for pin in direct_or_indirect:
            assert re.search(rf"\b{re.escape(pin.lower())}\b", reasons), f"{pin} of {name}.txt"


def direct_dependencies(extra: str) -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=!~ \[]", text)[0] for text in project["optional-dependencies"][extra]]


def test_an_unknown_image_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no image gpu; there are operator, sidecar, redis, valkey, redis-7, engine-cpu"
    ):
        select(["gpu"])

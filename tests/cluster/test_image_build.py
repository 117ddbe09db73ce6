"""What an image build depends on, and what it is told about this machine."""

from __future__ import annotations

import configparser
import io
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster import image_build
from e2e.cluster.ignorefile import context_files
from e2e.cluster.image_build import Build, merged_pip_configuration
from e2e.cluster.progress import Progress
from e2e.cluster.rootfs import report_if_newer
from e2e.cluster.settings import BOOKWORM, TRIXIE

pytestmark = pytest.mark.claim("an image is built again when an input changes, and only then")


@pytest.fixture
def build(tmp_path: Path) -> Build:
    context = tmp_path / "context"
    (context / "src" / "deep").mkdir(parents=True)
    for name in ("Dockerfile", "src/main.py", "src/deep/data.txt", "notes.md"):
        (context / name).write_text(name)
    return Build(context, context / "Dockerfile", "localhost/x:1", {"A": "1"}, tmp_path / "x.tar")


def names(context: Path, *patterns: str) -> list[str]:
    return [str(path.relative_to(context)) for path in context_files(context, patterns)]


def test_a_change_of_any_input_changes_the_digest(build: Build) -> None:
    before = build.digest("buildah")
    assert build.digest("buildah") == before
    assert build.digest("docker") != before
    assert replace(build, arguments={"A": "2"}).digest("buildah") != before
    assert replace(build, tag="localhost/x:2").digest("buildah") != before
    (build.context / "src" / "main.py").chmod(0o755)
    with_mode = build.digest("buildah")
    assert with_mode != before
    (build.context / "src" / "deep" / "data.txt").write_text("changed")
    assert build.digest("buildah") != with_mode


def test_the_base_image_is_the_one_that_was_asked_for_and_its_point_release_an_input(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.debian == TRIXIE
    on_bookworm = replace(build, arguments={"BASE": BOOKWORM.base_image})
    assert on_bookworm.debian == BOOKWORM
    before = build.digest("buildah"), on_bookworm.digest("buildah")
    monkeypatch.setattr(image_build, "TRIXIE", replace(TRIXIE, point_release="13.99"))
    after = build.digest("buildah"), on_bookworm.digest("buildah")
    assert (before[0] == after[0], before[1] == after[1]) == (False, True)


@pytest.mark.parametrize(("found", "said"), [("13.8", False), ("13.9", True)])
def test_another_point_release_than_the_one_tested_is_taken_and_said(tmp_path: Path, found: str, said: bool) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/debian_version").write_text(f"{found}\n")
    stream = io.StringIO()
    report_if_newer(tmp_path, replace(TRIXIE, point_release="13.8"), Progress(stream))
    assert ("this is Debian 13.9, and all was tested on 13.8" in stream.getvalue()) == said


def test_ignored_files_do_not_change_the_digest(build: Build) -> None:
    (build.context / ".dockerignore").write_text("*.md\n.dockerignore\n")
    before = build.digest("buildah")
    (build.context / "notes.md").write_text("changed")
    (build.context / ".git").mkdir()
    (build.context / ".git" / "HEAD").write_text("changed")
    assert build.digest("buildah") == before


def test_the_dockerfiles_own_ignore_file_wins(build: Build) -> None:
    (build.context / ".dockerignore").write_text("src\n")
    (build.context / "Dockerfile.dockerignore").write_text("*.md\n")
    assert build.ignore_file.name == "Dockerfile.dockerignore"


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ((), ["Dockerfile", "notes.md", "src/deep/data.txt", "src/main.py"]),
        (("src",), ["Dockerfile", "notes.md"]),
        (("/src/deep/",), ["Dockerfile", "notes.md", "src/main.py"]),
        (("*.txt",), ["Dockerfile", "notes.md", "src/deep/data.txt", "src/main.py"]),
        (("**/*.txt",), ["Dockerfile", "notes.md", "src/main.py"]),
        (("*", "!src/main.py"), ["src/main.py"]),
        (("!notes.md", "*.md"), ["Dockerfile", "src/deep/data.txt", "src/main.py"]),
    ],
)
def test_ignore_patterns_read_as_dockers(build: Build, patterns: tuple[str, ...], left: list[str]) -> None:
    assert names(build.context, *patterns) == left


def test_pip_settings_of_the_environment_win_and_paths_of_this_machine_stay_here() -> None:
    machine = "[global]\nindex-url = https://a.example/simple\ncert = /srv/me/ca.pem\nfind-links = /srv/me/wheels\n"
    environment = {"PIP_INDEX_URL": "https://b.example/simple", "PIP_CERT": "/srv/me/other.pem", "HOME": "/srv/me"}
    text = merged_pip_configuration(machine, environment, has_ca=True)
    parsed = configparser.RawConfigParser()
    parsed.read_string(text)
    assert dict(parsed["global"]) == {
        "index-url": "https://b.example/simple",
        "cert": "/run/secrets/ca",
    }
    assert "/srv/me" not in text


def test_without_settings_the_pip_configuration_says_nothing() -> None:
    parsed = configparser.RawConfigParser()
    parsed.read_string(merged_pip_configuration("", {}, has_ca=False))
    assert dict(parsed["global"]) == {}

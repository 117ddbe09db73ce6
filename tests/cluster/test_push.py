"""`make push`: images reach a registry under the chart's names, and a refusal says what to do."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from e2e.cluster.archive import image_identities, write_image
from e2e.cluster.build import CRANE, build_binaries
from e2e.cluster.progress import ClusterError, Progress, describe
from e2e.cluster.settings import Paths
from e2e.images.__main__ import main
from e2e.images.catalogue import select
from e2e.images.registry import check_registry, push_archives

pytestmark = pytest.mark.claim(
    "a push reaches a registry under the chart's names with stored credentials, and a refusal says what to do"
)


class Refusing(BaseHTTPRequestHandler):
    """A registry that asks for a password, and admits no one to a push."""

    seen: list[str]

    def _answer(self) -> None:
        credentials = self.headers.get("Authorization", "")
        self.seen.append(credentials)
        self.send_response(403 if credentials else 401)
        self.send_header("WWW-Authenticate", 'Basic realm="test"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = _answer  # noqa: N815 - names of the base class

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def refusing_registry() -> Iterator[tuple[str, list[str]]]:
    """Yield its address, and the credentials of each request."""
    handler = type("Handler", (Refusing,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"localhost:{server.server_port}", handler.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "program").write_text("content")
    written = tmp_path / "kvstrata-one.tar"
    write_image(written, tag="localhost/one:local", files=[("/program", tmp_path / "program")], command=["/program"])
    return written


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """The repository's binaries, and logs of this test's own."""
    build_binaries(Paths(), Progress(), [CRANE])
    own = Paths(tmp_path / "local")
    own.local.mkdir()
    for name in ("bin", "digests", "locks"):
        (own.local / name).symlink_to(Paths().local / name)
    return own


def test_a_pushed_image_is_in_the_registry_with_its_content(paths: Paths, archive: Path, tmp_path: Path) -> None:
    output = io.StringIO()
    crane = str(paths.bin / CRANE.name)
    command = [crane, "registry", "serve", "--address", "127.0.0.1:0", "--disk", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            port = next(line.split()[-1] for line in server.stderr if "serving on port" in line)
            name = f"localhost:{port}/team/kvstrata-one:0.1.0"
            push_archives({name: archive}, paths, Progress(output))
            manifest = json.loads(subprocess.check_output([crane, "manifest", name], stderr=subprocess.DEVNULL))
            digest = subprocess.check_output([crane, "digest", name], text=True, stderr=subprocess.DEVNULL).strip()
        finally:
            server.kill()
    (identity,) = image_identities(archive).values()
    assert manifest["config"]["digest"] == f"sha256:{identity}"
    assert f"pushed localhost:{port}/team/kvstrata-one@{digest}\n" in output.getvalue()


def test_a_refused_push_tells_how_to_log_in_and_has_sent_the_stored_credentials(
    paths: Paths, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with refusing_registry() as (address, seen):
        name = f"{address}/team/kvstrata-one:0.1.0"
        with pytest.raises(ClusterError) as refusal:
            push_archives({name: archive}, paths, Progress(io.StringIO()))
        assert not any(seen), "no credentials are stored yet"
        docker, crane = re.findall(r"`(.+?)`", refusal.value.advice)
        assert docker == f"docker login {address}"
        login = shlex.split(crane.replace(" USER ", " user "))
        subprocess.run(login, input=b"password", check=True, capture_output=True)
        with pytest.raises(ClusterError) as refusal:
            push_archives({name: archive}, paths, Progress(io.StringIO()))
    assert f"Basic {base64.b64encode(b'user:password').decode()}" in seen
    message = describe(refusal.value)
    assert message.startswith(f"error: pushing {name} failed")
    assert "403" in message
    assert message.endswith(f"  what to do: {refusal.value.advice}")


@pytest.mark.parametrize("registry", ["registry.example.com/team", "localhost:5000", "10.0.0.1:5000/a/b-c", "team"])
def test_a_registry_with_or_without_port_and_path_is_accepted(registry: str) -> None:
    check_registry(registry)


@pytest.mark.parametrize("registry", ["https://registry.example.com", "registry.example.com/", "Team", "a/b:0.1.0"])
def test_what_is_no_beginning_of_an_image_name_is_refused(registry: str) -> None:
    with pytest.raises(ClusterError) as refusal:
        check_registry(registry)
    assert "HOST[:PORT][/PATH]" in refusal.value.advice


def test_a_push_without_a_registry_shows_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push"]) == 1
    assert "make push REGISTRY=registry.example.com/team" in capsys.readouterr().err


def test_names_in_a_registry_are_those_of_the_chart() -> None:
    chart = (Paths().local.parent / "charts/kvstrata/Chart.yaml").read_text()
    (version,) = (line.split()[1].strip('"') for line in chart.splitlines() if line.startswith("appVersion:"))
    (image,) = select(["operator"])
    assert image.name_in("registry.example.com/team") == f"registry.example.com/team/kvstrata-operator:{version}"

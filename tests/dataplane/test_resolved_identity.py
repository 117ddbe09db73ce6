"""The identity that an engine resolves from the hub's cache and from a path, with its own libraries and no network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.engine.launch import environment
from e2e.engine.models import RANDOM
from kvstrata.contract.messages.engine_identity import EngineIdentity
from kvstrata_sidecar.upstream.resolved_identity import IMPORTS_S
from tests.dataplane.engine_process import engine_python

pytestmark = pytest.mark.lmcache
FIRST, SECOND = "1" * 40, "2" * 40
NAME = "acme/model"
TOKENIZER = "acme/tokenizer"
FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"weights"}


class Hub:
    """The cache of huggingface_hub below a home: branches in `refs`, commits in `snapshots`, contents in `blobs`."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def push(self, name: str, commit: str, branch: str = "main", **changed: bytes) -> Path:
        """Have a branch be at a commit whose files differ from `FILES` by `changed`; returns its snapshot."""
        folder = self._home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        for each in (folder / "refs", folder / "blobs", snapshot):
            each.mkdir(parents=True, exist_ok=True)
        for path, content in (FILES | {key.replace("_", "."): value for key, value in changed.items()}).items():
            blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            (snapshot / path).unlink(missing_ok=True)
            (snapshot / path).symlink_to(os.path.relpath(blob, snapshot))
        self.move(name, commit, branch)
        return snapshot

    def move(self, name: str, commit: str, branch: str = "main") -> None:
        """Have a branch be at a commit that is there."""
        (self._home / "hub" / f"models--{name.replace('/', '--')}" / "refs" / branch).write_text(commit)


class Engine:
    """A process with an engine's libraries."""

    def __init__(self, python: Path, home: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("resolving.py")), str(RANDOM.folder(python))],
            env=os.environ | environment(home) | {"HF_HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(home / "engine.log").open("wb"),
        )
        self._log = home / "engine.log"

    def resolve(self, model: str | Path = NAME, **more: Any) -> EngineIdentity:
        """Return the identity with this model, its own tokenizer and branch unless others are given."""
        asked = {"model": str(model), "tokenizer": str(model), "revision": None, "tokenizer_revision": None} | more
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-4000:]
        return EngineIdentity.decode(line)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def start(home: Path) -> Iterator[Callable[[], Engine]]:
    python = engine_python()
    if python is None:
        pytest.skip("no engine: run tests/dataplane/install_lmcache.py --engine or set KVSTRATA_ENGINE_PYTHON")
    engines: list[Engine] = []

    def start() -> Engine:
        engines.append(Engine(python, home))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def engine(start: Callable[[], Engine]) -> Engine:
    return start()


@pytest.fixture
def hub(home: Path) -> Hub:
    """Repositories whose branches are at their first commit."""
    hub = Hub(home)
    for name in (NAME, TOKENIZER):
        hub.push(name, FIRST)
    return hub


def test_a_hub_name_is_the_commit_of_its_branch_and_the_same_after_a_restart(
    hub: Hub, engine: Engine, start: Callable[[], Engine]
) -> None:
    found = engine.resolve()
    assert found.facts["commit"] == FIRST
    assert {"vllm", "torch", "lmcache", "attentionBackend", "dtype", "kvCacheDtype"} <= found.facts.keys()
    assert found.fingerprint
    assert start().resolve() == found


def test_a_moved_branch_is_another_identity_and_the_former_one_when_it_moves_back(hub: Hub, engine: Engine) -> None:
    before = engine.resolve()
    hub.push(NAME, SECOND, tokenizer_json=b"{}")
    moved = engine.resolve()
    assert moved.facts["commit"] == SECOND
    assert moved.fingerprint != before.fingerprint
    assert engine.resolve(revision=FIRST) == before, "a revision that is a commit does not move"
    hub.move(NAME, FIRST)
    assert engine.resolve() == before


def test_other_branches_and_documents_change_nothing(hub: Hub, engine: Engine) -> None:
    before = engine.resolve()
    hub.push(NAME, SECOND, branch="next")
    hub.push(NAME, FIRST, README_md=b"# A model")
    assert engine.resolve() == before
    assert engine.resolve(revision="next").fingerprint != before.fingerprint


def test_other_weights_under_the_same_commit_are_another_identity(hub: Hub, engine: Engine) -> None:
    before = engine.resolve()
    hub.push(NAME, FIRST, model_safetensors=b"wEights")
    after = engine.resolve()
    assert after.facts["commit"] == before.facts["commit"]
    assert after.fingerprint != before.fingerprint


def test_a_tokenizer_of_its_own_counts_too(hub: Hub, engine: Engine) -> None:
    before = engine.resolve(tokenizer=TOKENIZER)
    assert before.facts["tokenizerCommit"] == FIRST
    hub.push(TOKENIZER, SECOND)
    assert engine.resolve(tokenizer=TOKENIZER).fingerprint != before.fingerprint


def test_new_files_under_the_same_path_are_another_identity(engine: Engine, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    before = engine.resolve(tmp_path)
    assert before.facts["files"]
    assert engine.resolve(tmp_path) == before
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    other = engine.resolve(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"wEights")
    assert len({before.fingerprint, other.fingerprint, engine.resolve(tmp_path).fingerprint}) == 3


def test_files_that_changed_under_a_path_since_the_engine_began_give_no_fingerprint(
    hub: Hub, engine: Engine, tmp_path: Path
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    began_s = time.time()
    assert engine.resolve(tmp_path, began_s=began_s).fingerprint
    time.sleep(IMPORTS_S)
    (tmp_path / "model.safetensors").write_bytes(b"wEights")
    changed = engine.resolve(tmp_path, began_s=began_s)
    assert not changed.fingerprint
    assert "model.safetensors changed while the engine started" in changed.problem
    assert engine.resolve(tmp_path).fingerprint, "the next start loads them"
    hub.push(NAME, SECOND)
    assert engine.resolve(began_s=began_s).fingerprint, "the engine may have downloaded a snapshot itself"


def test_a_part_that_is_read_from_another_place_gives_no_fingerprint(hub: Hub, engine: Engine) -> None:
    none: dict[str, Any] = {"hf_config_path": None, "model_weights": "", "trust_remote_code": False}
    for part, change in (
        ("configuration", {"hf_config_path": "acme/other"}),
        ("weights", {"model_weights": "s3://bucket/model"}),
        ("weights", {"load_format": "tensorizer"}),
        ("code", {"trust_remote_code": True, "auto_map": {"AutoModel": "acme/other--modeling.Model"}}),
    ):
        found = engine.resolve(**none | change)
        assert not found.fingerprint
        assert f"reads {part} from another place than {NAME}" in found.problem
    for auto_map in ({"AutoModel": f"{NAME}--modeling.Model"}, {"AutoModel": "modeling.Model"}):
        assert engine.resolve(**none | {"trust_remote_code": True, "auto_map": auto_map}).fingerprint
    assert engine.resolve(**none).fingerprint


def test_a_model_that_is_not_there_has_no_fingerprint_and_the_reason(engine: Engine) -> None:
    found = engine.resolve("acme/none")
    assert not found.fingerprint
    assert "acme/none" in found.problem

"""Where credentials come from, and that a renewed token is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvstrata.clients.kube_auth import TOKEN_READ_EVERY_S, Credentials, NoCredentialsError, find_credentials

NOBODY = Path("/nonexistent")


def test_a_token_file_is_read_again_after_a_minute_and_not_before(tmp_path: Path) -> None:
    clock, file = [0.0], tmp_path / "token"
    file.write_text("old\n")
    credentials = Credentials("https://api", token_file=file, monotonic=lambda: clock[0])
    assert credentials.authorization() == {"Authorization": "Bearer old"}
    file.write_text("new\n")
    clock[0] = TOKEN_READ_EVERY_S - 1
    assert credentials.authorization() == {"Authorization": "Bearer old"}
    clock[0] = TOKEN_READ_EVERY_S
    assert credentials.authorization() == {"Authorization": "Bearer new"}


def test_a_token_file_that_is_missing_for_a_moment_leaves_the_token_in_use(tmp_path: Path) -> None:
    clock, file = [0.0], tmp_path / "token"
    file.write_text("old")
    credentials = Credentials("https://api", token_file=file, monotonic=lambda: clock[0])
    credentials.authorization()
    file.unlink()
    clock[0] = TOKEN_READ_EVERY_S
    assert credentials.authorization() == {"Authorization": "Bearer old"}


def test_a_kubeconfig_gives_server_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": {"server": "http://127.0.0.1:1/"}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    found = find_credentials({}, NOBODY)
    assert (found.server, found.authorization()) == ("http://127.0.0.1:1", {"Authorization": "Bearer secret"})


@pytest.mark.parametrize("text", ["", "current-context: gone", "[", "contexts: []"])
def test_a_kubeconfig_that_names_no_server_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(NoCredentialsError):
        find_credentials({}, NOBODY)


def test_without_any_credentials_the_error_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoCredentialsError, match="service account"):
        find_credentials({}, NOBODY)

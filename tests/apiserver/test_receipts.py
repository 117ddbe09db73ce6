"""Receipts on a real API server: nobody changes one, none has two successors, and kubectl gets them out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstrata.cli import plugin
from kvstrata.contract.receipt.record import read_link
from kvstrata.objects import names
from kvstrata.objects.erasure.receipts import RECEIPT_DATA_KEY, build_public_keys, build_receipt
from tests.apiserver.conftest import OPERATOR_NAMESPACE
from tests.apiserver.server import Server
from tests.support.receipts import DOMAIN, erasure, issue, keys, pod, rotated_chain

MANY_PODS = 3000


@pytest.fixture(scope="module")
def chain(server: Server) -> list[bytes]:
    """A chain whose last receipt takes several objects, created in order."""
    files = rotated_chain()
    files.append(issue(keys(2), files[-1], erasure("order-4", pods=tuple(pod(f"pod-{n}") for n in range(MANY_PODS)))))
    built = [one for data in files for one in build_receipt(OPERATOR_NAMESPACE, data)]
    assert len(built) > len(files) + 1
    for one in [*built, build_public_keys(OPERATOR_NAMESPACE, keys(2, previous=1).public_pems())]:
        server.kubectl("create", "-f", "-", stdin=json.dumps(one))
    return files


@pytest.fixture
def kubectl(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin is told of the cluster; it finds kubectl on the path, as it does when kubectl runs it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").symlink_to(server.kubectl_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return [f"--kubeconfig={server.kubeconfig}", f"--namespace={OPERATOR_NAMESPACE}"]


def test_what_is_exported_is_what_was_signed_and_verifies(
    chain: list[bytes], kubectl: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugin.main(["receipt", "export", "--to", str(tmp_path / "out"), *kubectl]) == 0
    exported = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.read_bytes() for path in exported] == chain
    assert plugin.main(["receipt", "keys", "--to", str(tmp_path / "keys"), *kubectl]) == 0
    pinned = str(tmp_path / "keys" / f"{keys(1).current_id}.pem")
    head = read_link(chain[-1]).digest
    verify = ["receipt", "verify", str(tmp_path / "out"), "--chain", "--public-key", pinned, "--head", head]
    assert plugin.main(verify) == 0


def test_the_list_names_every_receipt_of_a_domain(
    chain: list[bytes], kubectl: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugin.main(["receipt", "list", "--domain", DOMAIN, *kubectl]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(chain)
    assert all(read_link(data).digest[:16] in line for data, line in zip(chain, lines[1:], strict=True))
    assert plugin.main(["receipt", "list", "--domain", "ff", *kubectl]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_nobody_changes_a_receipt_or_writes_a_second_one_of_its_number(server: Server, chain: list[bytes]) -> None:
    name = names.receipt(DOMAIN, 1)
    patch = json.dumps({"data": {RECEIPT_DATA_KEY: "{}"}})
    with pytest.raises(AssertionError, match="immutable"):
        server.kubectl("-n", OPERATOR_NAMESPACE, "patch", "configmap", name, "--type=merge", "-p", patch)
    (other,) = build_receipt(OPERATOR_NAMESPACE, issue(keys(2), None, erasure("another")))
    assert other["metadata"]["name"] == name
    with pytest.raises(AssertionError, match="already exists"):
        server.kubectl("create", "-f", "-", stdin=json.dumps(other))
    assert chain

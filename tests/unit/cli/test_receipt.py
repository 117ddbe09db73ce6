"""`kubectl kvstrata receipt verify`: what it says, what it refuses, and that it needs no cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.cli import plugin
from kvstrata.contract.receipt.record import Fault, HandOverKind, read_link
from kvstrata.contract.receipt.residue import ReceiptClaim, Residue
from kvstrata.contract.wire import canonical_json
from tests.support.receipts import erasure, issue, keys, lazy, rotated_chain, rotation, subject

REPOSITORY = Path(__file__).resolve().parents[3]
HOLDS, REFUSED, UNUSABLE, UNVOUCHED, LACKING = range(5)

OFFLINE = """
import sys
allowed = sys.stdlib_module_names | {"kvstrata", "cryptography", "_cffi_backend", "cffi", "_openssl"}
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(f"{name} is not on an air-gapped machine")
sys.meta_path.insert(0, Guard())
import socket
socket.socket = None
from kvstrata.cli.plugin import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def pem(tmp_path: Path) -> Callable[[int], str]:
    """The file of a public key."""

    def file(seed: int) -> str:
        path = tmp_path / f"key-{seed}.pem"
        path.write_bytes(keys(seed).public_pems()[keys(seed).current_id])
        return str(path)

    return file


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., list[str]]:
    """The files of receipts."""

    def files(*receipts: bytes) -> list[str]:
        paths = [tmp_path / f"receipt-{number}.json" for number in range(len(receipts))]
        for path, data in zip(paths, receipts, strict=True):
            path.write_bytes(data)
        return list(map(str, paths))

    return files


def verify(*arguments: str) -> int:
    return plugin.main(["receipt", "verify", *arguments])


Put = Callable[..., list[str]]
Pem = Callable[[int], str]


def test_a_receipt_tells_what_is_proven_by_whom_and_what_is_not(
    put: Put, pem: Pem, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(*put(issue(keys(), None, lazy())), "--public-key", pem(1)) == HOLDS
    told = capsys.readouterr().out
    proven, rest = told.split("  not proven:")
    not_proven, left = rest.split("  left:")
    assert all(claim.meaning in proven for claim in (ReceiptClaim.UNREACHABLE, ReceiptClaim.KEYS_REVOKED))
    assert all(
        claim.meaning in not_proven
        for claim in (ReceiptClaim.KEYS_DESTROYED, ReceiptClaim.ERASED, ReceiptClaim.VERIFIED)
    )
    assert "because of EtcdBackups, EtcdHistory" in not_proven
    assert all(item.kind.meaning in left for item in lazy().residue)
    assert "1 acknowledged" in proven
    assert "stated by Operator operator-pod-uid" in proven
    assert "vouched for by a given key" in told


def test_everything_proven_names_who_deleted_and_who_looked(
    put: Put, pem: Pem, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(*put(issue(keys(), None, erasure())), "--public-key", pem(1), "--no-residue") == HOLDS
    told = capsys.readouterr().out
    assert "80 keys, 8000 bytes deleted; stated by Job job-uid" in told
    assert "stated by Operator operator-pod-uid: 2 servers empty" in told
    assert "not proven" not in told


def test_without_a_pinned_key_a_receipt_holds_and_the_exit_code_says_that_nobody_vouches(
    put: Put, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(*put(issue(keys(), None, erasure()))) == UNVOUCHED
    assert "NOT PROVEN whose key that is" in capsys.readouterr().out
    assert verify(*put(*rotated_chain()), "--chain") == UNVOUCHED
    assert f"NOT PROVEN whose key {keys(2).current_id[:16]} is" in capsys.readouterr().out


def tampered(data: bytes, *path: str | int, value: object) -> bytes:
    """A receipt in which somebody wrote another value, canonically."""
    raw = json.loads(data)
    place = raw
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return canonical_json(raw)


def test_each_forgery_is_refused_with_its_sentence(put: Put, pem: Pem, capsys: pytest.CaptureFixture[str]) -> None:
    good, other = issue(keys(1), None, erasure()), issue(keys(2), None, erasure())
    signature = json.loads(other)["signatures"][0]
    forgeries = {
        Fault.MALFORMED: b"{}",
        Fault.NOT_CANONICAL: json.dumps(json.loads(good), indent=1).encode(),
        Fault.UNKNOWN_VERSION: tampered(good, "record", "receipt", value=2),
        Fault.CLAIMS_EXCEED_FACTS: tampered(issue(keys(), None, lazy()), "record", "claims", value=["Erased"]),
        Fault.RESIDUE_WITHHELD: tampered(issue(keys(), None, lazy()), "record", "erasure", "residue", value=[]),
        Fault.CONTRADICTION: tampered(good, "record", "erasure", "revoked", 0, "name", value="globex"),
        Fault.KEY_SWAPPED: tampered(good, "signatures", 0, value=signature),
        Fault.SIGNATURE_FORGED: tampered(good, "record", "erasure", "subject", "reason", value="none"),
        Fault.UNKNOWN_SIGNER: other,
    }
    for fault, data in forgeries.items():
        assert verify(*put(data), "--public-key", pem(1)) == REFUSED, fault
        assert f"{fault}: {fault.meaning}" in capsys.readouterr().out
    assert verify(*put(good, *forgeries.values()), "--public-key", pem(1)) == REFUSED


def test_each_broken_chain_is_refused_with_its_sentence(put: Put, pem: Pem, capsys: pytest.CaptureFixture[str]) -> None:
    chain = rotated_chain()
    newest = read_link(chain[3]).digest
    fork = issue(keys(), chain[0], erasure("order-9"))
    lost = issue(keys(3), chain[0], rotation(keys(3), HandOverKind.LOST))
    cases: list[tuple[Fault, list[bytes]]] = [
        (Fault.CHAIN_BEGINS_LATE, chain[1:]),
        (Fault.CHAIN_HOLE, [chain[0], *chain[2:]]),
        (Fault.CHAIN_FORK, [*chain, fork]),
        (Fault.CHAIN_BROKEN, [chain[0], fork, *chain[2:]]),
        (Fault.CHAIN_TRUNCATED, chain[:3]),
        (Fault.KEY_CHANGED, [chain[0], issue(keys(2), chain[0], erasure("order-2"))]),
        (Fault.UNKNOWN_SIGNER, [chain[0], lost]),
    ]
    for fault, files in cases:
        head = newest if fault is not Fault.UNKNOWN_SIGNER else read_link(lost).digest
        assert verify(*put(*files), "--chain", "--head", head, "--public-key", pem(1)) == REFUSED, fault
        told = capsys.readouterr().out
        assert f"REFUSED as a chain: {fault}: {fault.meaning}" in told
        assert "HOLDS" not in told


def test_a_chain_says_whether_its_end_is_known(put: Put, pem: Pem, capsys: pytest.CaptureFixture[str]) -> None:
    files, newest = put(*rotated_chain()), read_link(rotated_chain()[3]).digest
    assert verify(*files, "--chain", "--public-key", pem(1)) == HOLDS
    assert "NOT PROVEN that no later receipt is missing" in capsys.readouterr().out
    assert verify(*files, "--chain", "--public-key", pem(2), "--head", newest) == HOLDS
    assert "no later receipt is missing" in capsys.readouterr().out
    assert verify(str(Path(files[0]).parent), "--chain", "--public-key", pem(1)) == HOLDS


def test_what_is_required_and_not_proven_has_its_own_exit_code(
    put: Put, pem: Pem, capsys: pytest.CaptureFixture[str]
) -> None:
    files = put(issue(keys(), None, lazy()))
    assert verify(*files, "--public-key", pem(1), "--require", "Unreachable") == HOLDS
    assert verify(*files, "--public-key", pem(1), "--require", "Erased", "--require", "Verified") == LACKING
    assert "does not prove Erased, Verified" in capsys.readouterr().out
    assert verify(*files, "--public-key", pem(1), "--no-residue") == LACKING
    assert Residue.ETCD_HISTORY in capsys.readouterr().out
    assert verify(*files, "--require", "Erased") == UNVOUCHED
    hand_over = put(rotated_chain()[2])
    assert verify(*hand_over, "--public-key", pem(1), "--require", "Unreachable") == LACKING


def test_what_cannot_be_read_is_no_verdict(put: Put, pem: Pem, tmp_path: Path) -> None:
    files = put(issue(keys(), None, erasure()))
    assert verify(str(tmp_path / "gone.json")) == UNUSABLE
    assert verify(*files, "--public-key", files[0]) == UNUSABLE
    assert verify(*files, "--head", "0" * 64) == UNUSABLE
    assert verify(*files, "--chain", "--head", "abc") == UNUSABLE
    (tmp_path / "empty").mkdir()
    assert verify(str(tmp_path / "empty")) == UNUSABLE
    with pytest.raises(SystemExit) as ended:
        verify(*files, "--require", "Everything")
    assert ended.value.code == UNUSABLE


def test_a_receipt_cannot_draw_on_a_terminal(put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    facts = erasure(subject=subject(reason="fine\x1b[2J\n  proven: \u202eeverything"))
    verify(*put(issue(keys(), None, facts)))
    told = capsys.readouterr().out
    assert "fine\N{REPLACEMENT CHARACTER}[2J" in told
    assert not any(character in told for character in "\x1b\u202e")


def test_verification_needs_the_standard_library_and_cryptography_and_no_network(put: Put, pem: Pem) -> None:
    newest = read_link(rotated_chain()[3]).digest
    files = put(*rotated_chain())
    command = ["receipt", "verify", "--chain", "--public-key", pem(1), "--head", newest]
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *command, *files],
        env={"PYTHONPATH": str(REPOSITORY / "operator/src")}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (HOLDS, "")
    assert "numbers 1 to 4" in done.stdout


def test_the_plugin_is_installed_under_the_name_that_kubectl_looks_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["kubectl-kvstrata"] == "kvstrata.cli.plugin:main"
    assert [name.partition(">")[0] for name in project["optional-dependencies"]["plugin"]] == ["cryptography"]

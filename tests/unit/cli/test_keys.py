"""`kubectl kvstrata keys`: what it stores, whom it removes, and what it says of tenants without a policy."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import plugin
from kvstrata.cli.keys import (
    NoSuchKeyError,
    entries_of,
    entry,
    listed,
    meant,
    policy_warning,
    with_entries,
)
from kvstrata.cli.text import CommandError
from kvstrata_sidecar.gate.http.errors import Refusal
from kvstrata_sidecar.gate.policy.api_keys import KeyRing
from tests.support import fake_kubectl

REPOSITORY = Path(__file__).resolve().parents[3]
NOW = datetime(2026, 11, 27, 12, 0, 0, tzinfo=UTC)
OF_THE_STANDARD_LIBRARY_ALONE = """
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names | {"kvstrata"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Guard())
from kvstrata.cli.plugin import main
sys.exit(main(sys.argv[1:]))
"""


def entries(*tenants: str) -> list[dict[str, Any]]:
    return [entry(tenant, f"key-{number}", NOW, None) for number, tenant in enumerate(tenants)]


def policy(tenant: str, **spec: Any) -> dict[str, Any]:
    return {"kind": "TenantCachePolicy", "spec": {"tenant": tenant, **spec}}


def test_the_gate_reads_what_is_stored_and_the_key_is_not_in_it() -> None:
    stored = with_entries(None, "tiny-api-keys", [entry("acme", "kvs_secret", NOW, "batch jobs")])
    document = base64.b64decode(stored["data"]["keys.json"])
    assert KeyRing.decode(document).tenant_of(b"kvs_secret", NOW.timestamp()) == "acme"
    assert b"kvs_secret" not in document
    assert entries_of(stored) == [
        {
            "tenant": "acme",
            "sha256": hashlib.sha256(b"kvs_secret").hexdigest(),
            "created": "2026-11-27T12:00:00Z",
            "note": "batch jobs",
        }
    ]


def test_gates_accept_a_key_with_days_until_these_are_over() -> None:
    stored = with_entries(None, "tiny-api-keys", [entry("acme", "kvs_secret", NOW, None, days=30)])
    ring = KeyRing.decode(base64.b64decode(stored["data"]["keys.json"]))
    end_s = NOW.timestamp() + 30 * 86_400
    assert ring.tenant_of(b"kvs_secret", end_s - 1) == "acme"
    with pytest.raises(Refusal, match="has expired"):
        ring.tenant_of(b"kvs_secret", end_s)


def test_everything_else_of_the_secret_and_its_entries_stays() -> None:
    by_hand = {"tenant": "globex", "sha256": "ab" * 32, "contact": "ops"}
    before = with_entries(None, "keys", [by_hand])
    before["metadata"]["resourceVersion"] = "7"
    before["data"]["other"] = "eA=="
    after = with_entries(before, "keys", [*entries_of(before), *entries("acme")])
    assert after["metadata"] == before["metadata"]
    assert after["data"]["other"] == "eA=="
    assert entries_of(after)[0] == by_hand


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", '{"keys": 5}', '{"keys": ["acme"]}'])
def test_a_malformed_secret_is_left_alone_with_a_sentence(text: str) -> None:
    secret = {"metadata": {"name": "keys"}, "data": {"keys.json": base64.b64encode(text.encode()).decode()}}
    with pytest.raises(CommandError, match=r"Secret keys: keys\.json is not of the form .*Correct it"):
        entries_of(secret)


def test_keys_are_removed_by_tenant_or_by_the_beginning_of_their_hash() -> None:
    held = entries("acme", "acme", "globex")
    assert meant(held, "acme", None) == held[:2]
    assert meant(held, None, held[2]["sha256"][:8].upper()) == held[2:]
    assert meant(held, "acme", held[1]["sha256"][:8]) == held[1:2]


def test_what_names_no_key_or_several_removes_none() -> None:
    held = [{**one, "sha256": "abcd" + one["sha256"]} for one in entries("acme", "globex")]
    for tenant, digits, says in (
        ("initech", None, "no such key; there are:\nTENANT"),
        ("acme", "ffff", "no such key"),
        (None, "abcd", "several hashes begin with abcd"),
        (None, "abc", "at least 4 digits"),
        (None, "", "at least 4 digits"),
    ):
        with pytest.raises(NoSuchKeyError, match=says):
            meant(held, tenant, digits)


def test_a_list_shows_no_more_of_a_hash_than_names_it() -> None:
    (one,) = held = [entry("acme", "key", NOW, None, days=30)]
    shown = listed([*held, {"tenant": "by\x1bhand", "sha256": "ab" * 32}])
    assert shown.splitlines() == [
        "TENANT  HASH      CREATED               EXPIRES               NOTE",
        f"acme    {one['sha256'][:8]}  2026-11-27T12:00:00Z  2026-12-27T12:00:00Z  -",
        "byhand  abababab  -                     -                     -",
    ]


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        ([policy("acme")], ""),
        ([policy("acme", models={"names": ["tiny"]})], ""),
        ([policy("acme", models={"selector": {"matchLabels": {"a": "b"}}})], ""),
        ([policy("acme", models={"names": ["other"]})], "are answered and reuse nothing"),
        ([policy("globex"), {"kind": "CacheDomain", "spec": {}}], "are answered and reuse nothing"),
        ([{"kind": "CacheDomain", "spec": {"unknownTenants": "Refuse"}}], "are refused (403)"),
    ],
)
def test_a_tenant_without_a_policy_is_warned_of_what_happens(objects: list[Any], says: str) -> None:
    warning = policy_warning(objects, "acme", "tiny", "demo")
    assert bool(warning) == bool(says)
    assert says in warning


@pytest.mark.parametrize(("status", "warned"), [(None, True), ({"servedBy": {"uid": "u"}}, False)])
def test_a_key_of_a_namespace_that_no_operator_serves_is_made_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: Any, warned: bool
) -> None:
    model = {"kind": "CachedModel", "metadata": {"name": "tiny", "namespace": "demo"}, "spec": {}}
    domain = {"kind": "CacheDomain", "metadata": {"name": "default"}, "spec": {}, "status": status}
    listed_objects = {"items": [policy("acme"), domain]}
    answers = {"get cachedmodels": {"items": [model]}, "get tenant": listed_objects, "get secret": "", "create": ""}
    fake_kubectl.put(tmp_path, monkeypatch, answers)
    assert plugin.main(["keys", "add", "tiny", "--tenant", "acme"]) == 0
    assert ("no operator serves the namespace" in capsys.readouterr().err) == warned


def test_keys_need_no_package_and_receipts_name_the_one_that_they_need() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", OF_THE_STANDARD_LIBRARY_ALONE, *arguments],
            env={"PYTHONPATH": str(REPOSITORY / "operator/src"), "PATH": "/nonexistent"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    without = run("keys", "list", "tiny")
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr == "kubectl is not on the path: install it, or add its folder to PATH\n"
    receipts = run("receipt", "list")
    assert (receipts.returncode, receipts.stdout) == (2, "")
    assert "needs the Python package cryptography: pip install '.[plugin]'" in receipts.stderr
    assert "keys" in run("--help").stdout

"""Data keys in memory only, from the CacheDomain's field over an operator's death to a receipt that says that keys are
destroyed which that operator had drawn, and over the next one's end in good order: a real API server, operator
processes, gate processes, the policy adapter, a Redis."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import plugin
from kvstrata.contract.policy.data_key import KEYS_DIRECTORY
from tests.apiserver.test_erasures import OPERATOR_NAMESPACE, Place
from tests.apiserver.test_erasures import place as place
from tests.support.objects import NAMESPACE, invalidation, own
from tests.support.redis_binary import needs_redis

pytestmark = needs_redis


def at_hand(place: Place) -> str:
    """Whether the operator has every key."""
    conditions = place.get("cachedomains", "default").get("status", {}).get("conditions", ())
    return next((one["status"] for one in conditions if one["type"] == "KeysAtHand"), "")


def keys_in(place: Place, number: int) -> set[bytes]:
    """The keys in a pod's memory volume."""
    directory = place.pods[number].directory / "policy" / KEYS_DIRECTORY
    return {path.read_bytes() for path in directory.glob("*.*") if not path.name.startswith(".")}


def is_a_pod(place: Place, operator: str) -> None:
    """Let there be the operator's pod, which a node keeps."""
    spec = {"nodeName": "node-9", "containers": [{"name": "operator", "image": "o:1"}]}
    metadata = {"name": operator, "namespace": OPERATOR_NAMESPACE}
    pods = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods"
    place.request("POST", pods, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, {})


def noted(place: Place) -> dict[str, Any]:
    """The note of who may have keys."""
    path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets/kvstrata-keyholders-{NAMESPACE}"
    stored = place.request("GET", path, None, {})
    found: dict[str, Any] = json.loads(base64.b64decode(stored["data"]["holders.json"]))
    return found


def test_keys_live_in_processes_only_come_back_to_the_next_operator_and_their_end_is_proven(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.server.apply(own("CacheDomain", "default", {"keyCustody": "Memory"}))
    is_a_pod(place, "operator-a")
    first = place.operators.start("operator-a")
    first.wait_until_leading(90)
    place.wait(
        "what pods need", lambda: place.has("secrets/kvs-tiny-gate-tls") and place.has("serviceaccounts/kvs-tiny")
    )
    domain = place.wait("the domain's id", lambda: place.get("cachedomains", "default")["status"].get("domainID"))
    for pod in place.pods:
        pod.start(domain, place.redis.port, place.plain.port)
    place.wait("policies in force", lambda: place.enforced("acme") and place.enforced("globex"))
    place.wait("keys in both pods", lambda: len(keys_in(place, 0)) == len(keys_in(place, 1)) == 2)
    keys = keys_in(place, 0)
    assert keys_in(place, 1) == keys
    leaving, staying = place.keyspace("acme"), place.keyspace("globex")
    place.pods[0].store(leaving, 1)
    place.pods[1].store(staying, 9)
    assert place.pods[0].finds(staying, 9) == [1], "both pods have one key for a keyspace"
    assert sum(place.copies(key) for key in keys) == 0

    before = keys_in(place, 0)
    first.kill()
    second = place.operators.start("operator-b")
    second.wait_until_leading(90)
    both: dict[str, Any] = {"operator-a": None, "operator-b": None}
    place.wait("a note of who is not known to have ended", lambda: noted(place)["operators"] == both)
    place.wait("keys to come back", lambda: at_hand(place) == "True")
    assert keys_in(place, 0) == keys_in(place, 1) == before
    assert place.keyspace("globex") == staying
    third = place.operators.start("operator-a")
    place.wait("word of the former process", lambda: noted(place)["operators"] == {"operator-b": None})

    place.server.apply(invalidation("leave", scope={"tenant": "acme"}, mode="Eager", reason="the contract ended"))
    place.wait("the end", lambda: place.status.get("phase") in ("Complete", "Failed"))
    assert place.status["phase"] == "Complete", place.tails()
    assert place.holds() >= {"KeysRevoked", "KeysDestroyed", "Erased", "Verified", "Complete"}, place.tails()
    stored = place.config_maps()
    (receipt,) = (data["receipt.json"] for name, data in stored.items() if name.startswith("kvstrata-receipt-"))
    (public_key,) = stored["kvstrata-receipts-keys"].values()
    (tmp_path / "receipt.json").write_text(receipt)
    (tmp_path / "key.pem").write_text(public_key)
    files = ["receipt", "verify", str(tmp_path / "receipt.json"), "--public-key", str(tmp_path / "key.pem")]
    assert plugin.main([*files, "--require", "KeysDestroyed"]) == 0, capsys.readouterr()
    place.wait("acme's new key", lambda: len(keys_in(place, 0)) == len(keys_in(place, 1)) == 2)
    (kept,) = keys & keys_in(place, 0)

    before = keys_in(place, 0)
    assert second.stop() == 0
    third.wait_until_leading(90)
    place.wait("keys to come back again", lambda: noted(place)["term"] == 3 and at_hand(place) == "True")
    assert (noted(place)["operators"], noted(place)["unaccounted"]) == ({"operator-a": None}, {}), "it left word"
    assert keys_in(place, 0) == keys_in(place, 1) == before
    assert kept in before
    assert place.pods[0].finds(staying, 9) == [1]
    assert sum(place.copies(key) for key in keys | before) == 0
    logs = "".join(operator.log_tail() for operator in place.operators.started)
    assert not any(form in logs for key in keys | before for form in (key.hex(), repr(key)))

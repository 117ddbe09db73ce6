"""The shortest sample on a real API server: the operator fills in the rest, and not into the spec."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml

from tests.apiserver.conftest import REPOSITORY
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.server import Server

MINIMAL = REPOSITORY / "manifests" / "samples" / "minimal.yaml"


def read(server: Server, kind: str, name: str) -> dict[str, Any]:
    found = server.kubectl("-n", "team-a", "get", kind, name, "--ignore-not-found", "-o", "json")
    return dict(json.loads(found)) if found.strip() else {}


@pytest.mark.usefixtures("operator")
def test_the_shortest_model_gets_its_tier_and_keeps_its_spec(server: Server, operator: OperatorProcess) -> None:
    declared, _ = yaml.safe_load_all(MINIMAL.read_text())
    server.kubectl("apply", "-f", str(MINIMAL))
    try:
        deadline = time.monotonic() + 60
        while not read(server, "deployment", "kvs-smollm2"):
            assert time.monotonic() < deadline, operator.log_tail()
            time.sleep(0.2)
        model, tier = read(server, "cachedmodel", "smollm2"), read(server, "cachetier", "smollm2")
        assert model["spec"] == declared["spec"]
        assert model["status"]["effective"]["tiers"] == ["smollm2"]
        assert model["status"]["effective"]["apiKeysSecret"] == "smollm2-api-keys"
        assert tier["spec"] == {"medium": "CPU", "capacityPerPod": "1Gi"}
        assert [owner["uid"] for owner in tier["metadata"]["ownerReferences"]] == [model["metadata"]["uid"]]
        (role,) = [rule for rule in read(server, "role", "kvs-smollm2")["rules"] if "watch" in rule["verbs"]]
        assert "smollm2-api-keys" in role["resourceNames"]
    finally:
        server.kubectl("delete", "-f", str(MINIMAL), "--wait=false")

"""The operator's client writes only while the process holds the Lease, by its own clock."""

from __future__ import annotations

import pytest

from kvstrata.cli.operator import Operator
from kvstrata.clients.kube import NotLeadingError
from kvstrata.clients.resources import SECRET
from kvstrata.settings import Settings
from tests.support.memory_kube import MemoryKube


async def test_the_client_of_the_operator_asks_the_lease_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"NAMESPACE": "ops", "POD_NAME": "operator-1", "SIDECAR_IMAGE": "sidecar:1", "REDIS_IMAGE": "redis:7"}
    kube = MemoryKube()
    operator = Operator(Settings.from_environment({f"KVSTRATA_{name}": value for name, value in named.items()}), kube)
    body = {"metadata": {"name": "one", "namespace": "ops"}}
    with pytest.raises(NotLeadingError):
        await kube.create(SECRET, "ops", body)
    monkeypatch.setattr(type(operator._lease), "held", True)
    await kube.create(SECRET, "ops", body)

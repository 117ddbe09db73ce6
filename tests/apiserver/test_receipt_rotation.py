"""The key of receipts is rotated by an operator process on a real API server: by annotation, by age, and although the
operator is killed; `kubectl kvstrata receipt` verifies what was signed before and after."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.control_plane import ControlPlane
from kvstrata.cli import plugin
from kvstrata.clients.kube import Kube
from kvstrata.objects import labels, names
from kvstrata.reconcile.erasure.receipt_chain import Chains
from tests.apiserver.conftest import OPERATOR_NAMESPACE, REPOSITORY, install_crds
from tests.apiserver.kubelet import wait
from tests.apiserver.operator_process import Operators
from tests.apiserver.server import Server
from tests.support.objects import NAMESPACE, own
from tests.support.receipts import erasure

PATIENCE_S = 120.0


class Place:
    """A served namespace, and the operator's, on an API server of its own."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self._folder = server, folder
        self.operators = Operators(server.kubeconfig, OPERATOR_NAMESPACE, REPOSITORY, folder)

    def get(self, *what: str, namespace: str = OPERATOR_NAMESPACE) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.server.kubectl("-n", namespace, "get", *what, "-o", "json"))
        return found

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("cachedomain", "default", namespace=NAMESPACE).get("status", {})
        return status

    def issue(self, uid: str) -> None:
        """Write a receipt, as who carries an erasure out does."""
        domain: str = self.status["domainID"]

        async def write() -> None:
            kube = await Kube.connect()
            try:
                chains = Chains(kube, OPERATOR_NAMESPACE, lambda: datetime.now(UTC))
                await chains.issue(NAMESPACE, domain, None, erasure(uid))
            finally:
                await kube.close()

        asyncio.run(write())

    def rotate(self, value: str) -> None:
        annotation = f"{labels.ROTATE_RECEIPTS_KEY}={value}"
        self.server.kubectl(
            "-n", OPERATOR_NAMESPACE, "annotate", "--overwrite", "configmap", names.RECEIPT_PUBLIC_KEYS, annotation
        )

    def private_keys(self) -> set[str]:
        """Private keys in the Secret."""
        data = self.get("secret", names.RECEIPTS_KEY_SECRET)["data"]
        return {name for name in data if name.endswith(".pem")}

    def public_keys(self) -> dict[str, str]:
        found: dict[str, str] = self.get("configmap", names.RECEIPT_PUBLIC_KEYS)["data"]
        return found

    def wait(self, what: str, holds: Any) -> Any:
        try:
            return wait(what, holds, PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{[one.log_tail() for one in self.operators.started]}") from error

    def wait_for_rotations(self, count: int) -> None:
        """Wait until so many keys were published, and only the newest signs."""
        self.wait("another key", lambda: len(self.public_keys()) == count + 1)
        self.wait("the end of the rotation", lambda: self.private_keys() == {"current.pem"})

    def verified(self, key: str, *more: str) -> int:
        """The exit code of the command that verifies the chain, with this public key alone."""
        folder = self._folder / "receipts"
        folder.mkdir(exist_ok=True)
        for raw in self.get("configmaps")["items"]:
            if raw["metadata"]["name"].startswith(names.RECEIPT_PREFIX):
                (folder / f"{raw['metadata']['name']}.json").write_text(raw["data"]["receipt.json"])
        pinned = self._folder / "pinned.pem"
        pinned.write_text(self.public_keys()[key])
        return plugin.main(["receipt", "verify", str(folder), "--chain", "--public-key", str(pinned), *more])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with ControlPlane(tmp_path / "control-plane") as plane:
        server = Server(plane.kubectl, plane.kubeconfig)
        install_crds(server)
        for namespace in (NAMESPACE, OPERATOR_NAMESPACE):
            server.kubectl("create", "namespace", namespace)
        server.apply(own("CacheDomain", "default", {}))
        monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
        made = Place(server, tmp_path)
        try:
            yield made
        finally:
            for operator in made.operators.running():
                operator.kill()


def test_receipts_of_before_and_after_rotations_verify_with_any_of_the_keys(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    first = place.operators.start("operator-a")
    first.wait_until_leading()
    place.wait("the domain's id", lambda: place.status.get("domainID"))
    place.issue("order-1")
    (old,) = place.public_keys()

    place.rotate("one")
    place.wait_for_rotations(1)
    assert first.metric("kvstrata_receipts_key_rotations_total") == 1
    place.issue("order-2")
    (new,) = place.public_keys().keys() - {old}
    for key in (old, new):
        assert place.verified(key) == 0, capsys.readouterr()

    place.rotate("two")
    place.wait("the key", lambda: len(place.public_keys()) == 3)
    first.kill()
    place.operators.start("operator-b").wait_until_leading()
    place.wait_for_rotations(2)
    place.wait("the chain's head", lambda: (place.status.get("receipts") or {}).get("count") == 4)
    for key in place.public_keys():
        assert place.verified(key, "--head", place.status["receipts"]["head"]) == 0, capsys.readouterr()
    reasons = [event["reason"] for event in place.get("events", namespace=NAMESPACE)["items"]]
    assert reasons.count("ReceiptsKeyRotated") >= 1


def test_a_key_is_rotated_when_its_days_are_over(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    operator = place.operators.start("operator-a", KVSTRATA_RECEIPTS_KEY_DAYS="0.0003")
    operator.wait_until_leading()
    place.wait("the domain's id", lambda: place.status.get("domainID"))
    place.issue("order-1")
    (old,) = place.public_keys()
    place.wait("another key", lambda: len(place.public_keys()) >= 2)
    place.wait("the hand-over", lambda: (place.status.get("receipts") or {}).get("count", 0) >= 2)
    assert place.verified(old) == 0, capsys.readouterr()

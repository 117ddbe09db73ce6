"""The gate against a real API server, with no more rights than its Role gives it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from e2e.cluster.control_plane import ControlPlane
from kvstrata_sidecar.gate.policy.kube_api import ApiError

from .world import ACME, BUNDLE, KEYS, World, entry, keyspace, post, until

pytestmark = pytest.mark.apiserver

NAMESPACE = "ns"


class RealApi:
    """What the tests write with: the administrator's rights on a real API server."""

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        url = urlsplit(cluster["server"])
        assert url.hostname
        assert url.port
        self.host, self.port = url.hostname, url.port
        self.ca_file = directory / "kube-ca.crt"
        if "certificate-authority-data" in cluster:
            self.ca_file.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
        else:
            self.ca_file.write_bytes(Path(cluster["certificate-authority"]).read_bytes())
        self._client = config.new_client_from_config(str(kubeconfig))
        # Bodies are written as dictionaries, which the client takes and its types do not.
        self.core: Any = client.CoreV1Api(self._client)
        self.rbac: Any = client.RbacAuthorizationV1Api(self._client)

    async def put(self, name: str, data: dict[str, bytes]) -> None:
        """Create or replace a Secret."""
        body = {"metadata": {"name": name}, "data": {k: base64.b64encode(v).decode() for k, v in data.items()}}
        try:
            await asyncio.to_thread(self.core.replace_namespaced_secret, name, NAMESPACE, body)
        except ApiException as error:
            if error.status != 404:
                raise
            await asyncio.to_thread(self.core.create_namespaced_secret, NAMESPACE, body)

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture
async def real(world: World, control_plane: ControlPlane) -> AsyncIterator[World]:
    """A gate that reads with its ServiceAccount's token, and nothing but what a model's gate may read."""
    api = RealApi(control_plane.kubeconfig, world.directory)
    world.api = api  # type: ignore[assignment]  # the same two methods and a port
    await asyncio.to_thread(grant, api, world.directory)
    await world.publish([entry("acme")], revision=int(time.time()))
    await world.publish_keys(acme=ACME)
    changes = {"kube_host": api.host, "kube_port": api.port, "kube_ca_file": api.ca_file}
    try:
        async with world.started(**changes):
            await world.acked(world.root.revision)
            await until(lambda: len(world.gate.keys.ring) == 1)
            yield world
    finally:
        api.core.delete_namespaced_secret(BUNDLE, NAMESPACE)
        api.close()
        world.api = StoppedApi()  # type: ignore[assignment]


class StoppedApi:
    """Nothing is left to stop."""

    async def stop(self) -> None:
        """Do nothing."""


def grant(api: RealApi, directory: Path) -> None:
    """Make the namespace, the ServiceAccount with its Role, and a token for it."""
    subject = {"kind": "ServiceAccount", "name": "gate", "namespace": NAMESPACE}
    rules = [
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [BUNDLE, KEYS], "verbs": ["get", "watch"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [f"{BUNDLE}-0a", f"{BUNDLE}-0b"],
         "verbs": ["get"]},
    ]  # fmt: skip
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gate"}
    try:
        api.core.create_namespace({"metadata": {"name": NAMESPACE}})
        api.core.create_namespaced_service_account(NAMESPACE, {"metadata": {"name": "gate"}})
        api.rbac.create_namespaced_role(NAMESPACE, {"metadata": {"name": "gate"}, "rules": rules})
        api.rbac.create_namespaced_role_binding(
            NAMESPACE, {"metadata": {"name": "gate"}, "roleRef": role, "subjects": [subject]}
        )
        api.core.create_namespaced_secret(NAMESPACE, {"metadata": {"name": "somebody-elses"}})
    except ApiException as error:
        if error.status != 409:
            raise
    token = api.core.create_namespaced_service_account_token("gate", NAMESPACE, {"spec": {"audiences": []}})
    (directory / "kube-token").write_text(token.status.token)


async def test_an_edit_reaches_the_gate_by_the_watch(real: World) -> None:
    # Several edits, because a watch that was just opened may miss the first and leave it to the periodic read.
    took = []
    for number in range(4):
        revision = await real.publish([entry("acme", f"acme-{number}")])
        begun = time.monotonic()
        await until(lambda revision=revision: real.gate.enforcement.acked >= revision, 40)  # type: ignore[misc]
        took.append(time.monotonic() - begun)
        await asyncio.sleep(1.2)
    # The periodic read comes after more than twenty seconds.
    assert sorted(took)[1] < 10.0, took
    assert (await real.ask(post("/v1/completions", {"prompt": "a"}))).status == 200
    assert real.engine.requests[-1].json["cache_salt"] == keyspace("acme-3")


async def test_the_gate_can_read_no_other_secret(real: World) -> None:
    with pytest.raises(ApiError) as refused:
        await real.gate.api.get_secret("somebody-elses")
    assert refused.value.status == 403


async def test_a_bundle_that_is_deleted_leaves_the_policy_in_force_and_unconfirmed(real: World) -> None:
    api = real.api
    confirmed = real.gate.freshness.sent_ns
    await asyncio.to_thread(api.core.delete_namespaced_secret, BUNDLE, NAMESPACE)  # type: ignore[attr-defined]
    await real.gate.bundles.refresh()
    assert "does not exist" in real.gate.bundles.problem
    assert real.gate.enforcement.bundle is not None
    await real.publish([entry("acme", "again")])
    await until(lambda: real.gate.freshness.sent_ns > confirmed, 40)

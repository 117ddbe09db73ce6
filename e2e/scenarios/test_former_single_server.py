"""A tier with one shard whose server was made by an earlier version, as a single one: it goes when the operator is
upgraded, and a cluster of one takes its place. Its blocks are lost; requests are answered all the while."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.product.chapters import ACME_KEY, GLOBEX_KEY, Stage
from e2e.product.direct_operator import Operators
from e2e.product.faults_traffic import found_across, tenants_ask, wait_until_well
from e2e.product.install import DEMO_NAMESPACE
from e2e.product.kubectl import CommandError, Kubectl, wait_until
from e2e.product.shared_tier import TIER
from kvstrata.objects import labels, names, paths

pytestmark = pytest.mark.cluster

SET, POD = names.redis(TIER), f"{names.redis(TIER)}-0"
SHARD = names.redis_shard(TIER, 0)
UPGRADED_S, HEALED_S = 120.0, 180.0


def test_it_goes_and_tenants_never_wait_for_it(stage: Stage) -> None:
    kubectl = stage.kubectl
    with tenants_ask(stage) as ordeal:
        with Operators(kubectl).absent():
            shard = kubectl.get("statefulset", SHARD, DEMO_NAMESPACE)
            kubectl.run("-n", DEMO_NAMESPACE, "delete", "statefulset", SHARD, "--cascade=foreground")
            kubectl.apply(_former(shard))
            kubectl.run("-n", DEMO_NAMESPACE, "rollout", "status", f"statefulset/{SET}", "--timeout=90s")
            ordeal.lasts_for(12)
        wait_until("the former server goes", lambda: not _is_there(kubectl, "statefulset", SET), UPGRADED_S)
        wait_until("its pod goes", lambda: not _is_there(kubectl, "pod", POD), UPGRADED_S)
        wait_until("the tier is ready", lambda: _is_ready(kubectl), HEALED_S)
        for key in (ACME_KEY, GLOBEX_KEY):
            wait_until("hits return", lambda key=key: found_across(stage.first, stage.second, key), HEALED_S)
    wait_until_well(kubectl)


def _former(shard: dict[str, Any]) -> dict[str, Any]:
    """The StatefulSet that an earlier version made: one server that is no cluster, under the tier's own name."""
    pod = shard["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = ["--port", "0", "--tls-port", str(paths.REDIS_PORT), "--tls-auth-clients", "no"]
    arguments += ["--tls-cert-file", f"{paths.REDIS_TLS}/{names.CERTIFICATE_KEY}"]
    arguments += ["--tls-key-file", f"{paths.REDIS_TLS}/{names.PRIVATE_KEY_KEY}"]
    arguments += ["--tls-ca-cert-file", f"{paths.REDIS_TLS}/{names.AUTHORITY_KEY}"]
    arguments += ["--aclfile", f"{paths.REDIS_AUTH}/{names.ACL_FILE_KEY}", "--save", "", "--dir", paths.TEMPORARY]
    single = {key: value for key, value in container.items() if key not in ("env", "lifecycle")}
    single |= {"command": ["redis-server"], "args": arguments}
    template = {
        "metadata": {"labels": labels.of_tier(TIER)},
        "spec": {**pod, "containers": [single], "terminationGracePeriodSeconds": 10},
    }
    kept = {key: shard["metadata"][key] for key in ("namespace", "ownerReferences")}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {**kept, "name": SET, "labels": labels.of_tier(TIER)},
        "spec": {
            "serviceName": SET,
            "replicas": 1,
            "selector": {"matchLabels": labels.selector_of_tier(TIER)},
            "template": template,
        },
    }


def _is_there(kubectl: Kubectl, kind: str, name: str) -> bool:
    try:
        kubectl.get(kind, name, DEMO_NAMESPACE)
    except CommandError:
        return False
    return True


def _is_ready(kubectl: Kubectl) -> bool:
    return kubectl.condition("cachetier", TIER, DEMO_NAMESPACE, "Ready").get("status") == "True"

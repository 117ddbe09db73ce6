from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Root, Rules, ShardRef, encode_shard
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.objects import names
from kvstrata.objects.erasure.delete_job import TierDeletion, build_deletion_job, build_deletion_networkpolicy
from kvstrata.objects.pod.access import build_model_networkpolicy, build_redis_networkpolicy, build_role
from kvstrata.objects.pod.pod import pod_template
from kvstrata.objects.pod.workload import build_model_service, build_pdb, build_servicemonitor
from kvstrata.reconcile.bundles import bundle_secret
from tests.unit.objects.builders import CONTEXT, DOMAIN_ID, IDENTITY, cpu_tier, model, redis_tier, tier


def test_a_gate_may_read_its_bundle_and_keys_by_name_and_nothing_else() -> None:
    rules = build_role(model(), 2)["rules"]
    assert {rule["resources"][0] for rule in rules} == {"secrets"}
    assert all(rule["resourceNames"] for rule in rules)
    granted = {(name, verb) for rule in rules for name in rule["resourceNames"] for verb in rule["verbs"]}
    shards = {f"kvs-tiny-bundle-{index}{slot}" for index in range(2) for slot in "ab"}
    assert granted == {(name, verb) for name in ("kvs-tiny-bundle", "keys") for verb in ("get", "watch")} | {
        (shard, "get") for shard in shards
    }


def test_a_role_names_the_secrets_that_the_bundle_is_stored_in() -> None:
    root = Root("d" * 16, "tiny", "uid-tiny", 1, 1, Rules(), (ShardRef(0, "a", "0" * 64),))
    owner = model().owner_reference()
    stored = [
        bundle_secret(names.bundle_root("tiny"), "team", {ROOT_DATA_KEY: root.encode()}, "tiny", owner),
        bundle_secret(names.bundle_shard("tiny", 0, "a"), "team", {SHARD_DATA_KEY: encode_shard(())}, "tiny", owner),
        bundle_secret(names.bundle_shard("tiny", 0, "b"), "team", {SHARD_DATA_KEY: encode_shard(())}, "tiny", owner),
    ]
    named = {name for rule in build_role(model(), 1)["rules"] for name in rule["resourceNames"]}
    assert {secret["metadata"]["name"] for secret in stored} <= named
    assert Root.decode(base64.b64decode(stored[0]["data"]["root.json"])) == root


def test_only_the_operator_reaches_the_control_port() -> None:
    ingress = build_model_networkpolicy(CONTEXT, model())["spec"]["ingress"]
    (control,) = [rule for rule in ingress if {"protocol": "TCP", "port": 9443} in rule["ports"]]
    (peer,) = control["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": CONTEXT.operator_namespace}
    assert peer["podSelector"]["matchLabels"] == dict(CONTEXT.operator_labels)


def test_health_and_metrics_admit_the_peers_of_the_installation_or_all() -> None:
    port = {"protocol": "TCP", "port": 8081}
    (everybody,) = [
        one for one in build_model_networkpolicy(CONTEXT, model())["spec"]["ingress"] if port in one["ports"]
    ]
    assert "from" not in everybody
    chosen = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    monitoring = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    block = {"ipBlock": {"cidr": "10.0.0.0/8"}}
    ctx = replace(CONTEXT, metrics_from=(chosen, monitoring, {**monitoring, **chosen}, block))
    (rule,) = [one for one in build_model_networkpolicy(ctx, model())["spec"]["ingress"] if port in one["ports"]]
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": CONTEXT.operator_namespace}}}
    assert rule["from"] == [{**here, **chosen}, monitoring, {**monitoring, **chosen}, block]


def test_a_tier_admits_pods_by_the_label_of_the_models_that_list_it() -> None:
    policy = build_redis_networkpolicy(CONTEXT, redis_tier("shared"), ["tiny", "other"])
    assert policy is not None
    (admitted,) = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
    pods = pod_template(CONTEXT, DOMAIN_ID, model(), (), IDENTITY)["metadata"]["labels"]
    assert (admitted["operator"], admitted["values"]) == ("In", ["other", "tiny"])
    assert pods[admitted["key"]] == "tiny"
    assert build_redis_networkpolicy(CONTEXT, cpu_tier()) is None


def test_a_tier_admits_the_job_that_deletes_from_it_and_that_of_no_other_tier() -> None:
    policy = build_redis_networkpolicy(CONTEXT, redis_tier("shared"))
    assert policy is not None
    peer = policy["spec"]["ingress"][0]["from"][-1]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": CONTEXT.operator_namespace}
    admitted = peer["podSelector"]["matchLabels"]
    for name in ("shared", "other"):
        job = build_deletion_job(CONTEXT, TierDeletion("order-1", redis_tier(name), 1, "d", 1, ("0" * 32,)))
        labels = job["spec"]["template"]["metadata"]["labels"]
        assert (admitted.items() <= labels.items()) == (name == "shared")


def test_the_service_leads_to_the_port_that_the_gate_listens_on() -> None:
    encrypted, plain = model(), model(gate={"tls": {"mode": "Disabled"}})
    assert build_model_service(encrypted)["spec"]["ports"][0]["targetPort"] == 8443
    assert build_model_service(plain)["spec"]["ports"][0]["targetPort"] == 8080


def test_a_single_replica_has_no_disruption_budget() -> None:
    assert build_pdb(model(engine={"replicas": 1})) is None
    budget = build_pdb(model(engine={"replicas": 2}))
    assert budget is not None
    assert budget["spec"]["maxUnavailable"] == 1


def test_a_servicemonitor_exists_only_where_its_kind_does() -> None:
    assert build_servicemonitor(model(), crd_installed=False) is None
    assert build_servicemonitor(model(), crd_installed=True) is not None


@pytest.mark.parametrize("cluster", [True, False])
def test_a_deletion_from_external_servers_reaches_no_link_local_address(cluster: bool) -> None:
    """A server of a cluster names others, and a node's credentials are at such an address in many clouds."""
    external = {"endpoints": ["redis.example:6379"], "cluster": cluster}
    blocks = egress_of_deletion(external, AllowedServers(reserved=("[192.0.2.7]:6443", "[2001:db8::7]:6379")))
    named = ["192.0.2.7/32"] if cluster else []
    assert [(one["cidr"], one["except"]) for one in blocks] == [
        ("0.0.0.0/0", ["127.0.0.0/8", "169.254.0.0/16", *named]),
        ("::/0", ["::1/128", "fe80::/10", "2001:db8::7/128"]),
    ]


@pytest.mark.parametrize(
    ("endpoint", "allowed", "reached"),
    [
        ("10.0.0.7:6379", AllowedServers(), ["10.0.0.7/32"]),
        ("[2001:db8::7]:6379", AllowedServers(("*.example",), ("2001:db8::/32",)), ["2001:db8::7/128"]),
        ("169.254.169.254:80", AllowedServers(), []),
        ("10.0.0.7:6443", AllowedServers(reserved=("[10.0.0.7]:6443",)), []),
        ("redis.example:6379", AllowedServers((), ("10.1.0.0/16", "fd00::/8")), ["10.1.0.0/16", "fd00::/8"]),
        ("redis.example:6379", AllowedServers(("*.example",), ("10.1.0.0/16",)), ["0.0.0.0/0", "::/0"]),
    ],
)
def test_a_deletion_reaches_the_addresses_that_its_tier_needs(
    endpoint: str, allowed: AllowedServers, reached: list[str]
) -> None:
    assert [one["cidr"] for one in egress_of_deletion({"endpoints": [endpoint]}, allowed)] == reached


def egress_of_deletion(external: dict[str, Any], allowed: AllowedServers) -> list[dict[str, Any]]:
    """The addresses that the Job of a deletion from external servers may reach, beside pods of the cluster."""
    made_of = tier("shared", medium="Redis", capacity="64Mi", encryption="Disabled", redis={"external": external})
    job = build_deletion_job(CONTEXT, TierDeletion("e", made_of, 1, DOMAIN_ID, 1, ()))
    made = {**job, "metadata": job["metadata"] | {"uid": "1"}}
    _, servers = build_deletion_networkpolicy(made, made_of, allowed)["spec"]["egress"]
    pods, *others = servers["to"]
    assert pods == {"namespaceSelector": {}}, "pods of the cluster may be such servers, too"
    port = int(external["endpoints"][0].rpartition(":")[2])
    admitted = {"port": 1, "endPort": 65535} if external.get("cluster") else {"port": port}
    assert servers["ports"] == [{"protocol": "TCP", **admitted}]
    return [one["ipBlock"] for one in others]

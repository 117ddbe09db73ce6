"""NetworkPolicy objects become the nftables rules that the API's documentation promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

import pytest

from e2e.cluster import rootfs
from e2e.cluster.netpol.rules import ruleset
from e2e.cluster.settings import Paths

pytestmark = pytest.mark.claim("a NetworkPolicy drops what Kubernetes says, on the local cluster")

NAMESPACES = [
    {"metadata": {"name": "models", "labels": {"team": "inference"}}},
    {"metadata": {"name": "clients", "labels": {"team": "apps"}}},
]


def pod(name: str, address: str, *, namespace: str = "models", **spec: Any) -> dict[str, Any]:
    containers = [{"name": "c", "ports": spec.pop("ports", [])}]
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": containers, **spec},
        "status": {"podIP": address, "phase": "Running"},
    }


def policy(spec: dict[str, Any], *, name: str = "p", namespace: str = "models") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"podSelector": {}, **spec}}


GATE = pod("gate", "10.244.0.2", ports=[{"name": "http", "containerPort": 8000}])
REDIS = pod("redis", "10.244.0.3")
CALLER = pod("caller", "10.244.0.4", namespace="clients")
PODS = [GATE, REDIS, CALLER]


def chains(table: str) -> dict[str, list[str]]:
    """The table's chains: name to rules."""
    found = re.findall(r"  chain (\w+) \{\n(.*?)  \}", table, re.DOTALL)
    return {name: [line.strip() for line in body.splitlines()] for name, body in found}


def rules_of(*policies: dict[str, Any], pods: list[dict[str, Any]] = PODS) -> dict[str, list[str]]:
    return chains(ruleset(pods, NAMESPACES, policies))


def test_without_policies_no_packet_is_dropped() -> None:
    assert "drop" not in ruleset(PODS, NAMESPACES, [])


def test_a_policy_without_rules_drops_all_that_enters_its_pods_and_nothing_else() -> None:
    rules = rules_of(policy({"podSelector": {"matchLabels": {"app": "redis"}}}))
    assert rules["ingress_10_244_0_3"] == ["counter drop"]
    assert rules["ingress"] == ["ip daddr vmap { 10.244.0.3 : jump ingress_10_244_0_3 }"]
    assert rules["egress"] == []


def test_a_pod_selector_means_pods_of_the_policys_own_namespace() -> None:
    peer: dict[str, Any] = {"podSelector": {}}
    rules = rules_of(policy({"podSelector": {"matchLabels": {"app": "redis"}}, "ingress": [{"from": [peer]}]}))
    assert rules["ingress_10_244_0_3"] == ["ip saddr { 10.244.0.2, 10.244.0.3 } return", "counter drop"]


def test_namespace_and_pod_selector_in_one_peer_must_both_match() -> None:
    peer = {
        "namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["apps"]}]},
        "podSelector": {"matchLabels": {"app": "caller"}},
    }
    rules = rules_of(policy({"podSelector": {"matchLabels": {"app": "gate"}}, "ingress": [{"from": [peer]}]}))
    assert rules["ingress_10_244_0_2"] == ["ip saddr { 10.244.0.4 } return", "counter drop"]

    peer["podSelector"] = {"matchLabels": {"app": "gate"}}
    rules = rules_of(policy({"podSelector": {"matchLabels": {"app": "gate"}}, "ingress": [{"from": [peer]}]}))
    assert rules["ingress_10_244_0_2"] == ["counter drop"], "a peer that no pod matches must not allow everything"


def test_several_peers_and_several_policies_add_up() -> None:
    first = policy({"ingress": [{"from": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.7/32"]}}]}]})
    second = policy({"ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]}]}, name="q")
    rules = rules_of(first, second)
    assert rules["ingress_10_244_0_2"] == [
        "ip saddr 192.0.2.0/24 ip saddr != { 192.0.2.7/32 } return",
        "ip saddr { 10.244.0.4 } return",
        "counter drop",
    ]


def test_ports_by_number_range_and_name() -> None:
    ports = [{"port": 6379}, {"port": 7000, "endPort": 7010, "protocol": "UDP"}, {"port": "http"}, {"protocol": "SCTP"}]
    rules = rules_of(policy({"podSelector": {"matchLabels": {"app": "gate"}}, "ingress": [{"ports": ports}]}))
    assert rules["ingress_10_244_0_2"] == [
        "tcp dport 6379 return",
        "udp dport 7000-7010 return",
        "ip daddr 10.244.0.2 tcp dport 8000 return",
        "meta l4proto sctp return",
        "counter drop",
    ]


def test_a_port_name_that_the_pod_does_not_have_allows_nothing() -> None:
    rules = rules_of(
        policy({"podSelector": {"matchLabels": {"app": "redis"}}, "ingress": [{"ports": [{"port": "http"}]}]})
    )
    assert rules["ingress_10_244_0_3"] == ["counter drop"]


def test_egress_filters_by_destination_and_a_port_name_is_the_receivers() -> None:
    spec = {
        "podSelector": {"matchLabels": {"app": "redis"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": "http"}]}],
    }
    rules = rules_of(policy(spec))
    assert rules["egress"] == ["ip saddr vmap { 10.244.0.3 : jump egress_10_244_0_3 }"]
    assert rules["egress_10_244_0_3"] == [
        "ip daddr { 10.244.0.2, 10.244.0.3 } ip daddr 10.244.0.2 tcp dport 8000 return",
        "counter drop",
    ]
    assert rules["ingress"] == []


def test_egress_rules_without_policy_types_restrict_both_directions() -> None:
    rules = rules_of(policy({"podSelector": {"matchLabels": {"app": "redis"}}, "egress": [{}]}))
    assert rules["egress_10_244_0_3"] == ["return", "counter drop"]
    assert rules["ingress_10_244_0_3"] == ["counter drop"]


def test_finished_pods_and_pods_of_the_hosts_network_do_not_count() -> None:
    finished = pod("finished", "10.244.0.3")
    finished["status"]["phase"] = "Succeeded"
    on_host = pod("on-host", "10.89.0.2", hostNetwork=True)
    assert rules_of(policy({}), pods=[finished, on_host])["ingress"] == []


def test_the_order_of_objects_does_not_change_the_table() -> None:
    policies = [policy({"ingress": [{"ports": [{"port": 1}]}]}), policy({"ingress": [{}]}, name="q")]
    assert ruleset(PODS, NAMESPACES, policies) == ruleset(PODS[::-1], NAMESPACES[::-1], policies[::-1])


@pytest.mark.skipif(
    os.geteuid() != 0 or not Paths().rootfs.is_dir() or shutil.which("unshare") is None,
    reason="needs root and the root file system of `python3 -m e2e.cluster build`",
)
def test_nftables_accepts_every_kind_of_rule() -> None:
    spec = {
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.7/32"]}}, {"podSelector": {}}]}],
        "egress": [
            {},
            {"ports": [{"port": "http"}, {"port": 1, "endPort": 2}, {"protocol": "UDP"}]},
            {"to": [{"namespaceSelector": {}}], "ports": [{"port": "http"}, {"protocol": "SCTP", "port": 5}]},
        ],
    }
    checked = subprocess.run(
        ["unshare", "--net", *rootfs.host_command(Paths().rootfs, "usr/sbin/nft"), "-f", "-"],
        input=ruleset(PODS, NAMESPACES, [policy(spec)]),
        text=True,
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr

"""From NetworkPolicy objects to an nftables table.

Each pod that a policy selects gets a chain per direction: the rules of all its policies allow (``return``), and packets
that no rule allows are dropped. Pods that no policy selects get no chain, and so are open, as the API defines. A packet
between two pods passes the sender's egress chain first, then the receiver's ingress chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
TABLE = "kvstrata_netpol"
ACTIVE_PHASES = ("Pending", "Running")


@dataclass(frozen=True, slots=True)
class Pod:
    """Facts of a pod that policies refer to.

    Attributes:
        namespace: its namespace.
        labels: its labels.
        address: its IPv4 address.
        named_ports: (name, protocol in lower case, number) of its containers' ports.
    """

    namespace: str
    labels: dict[str, str]
    address: str
    named_ports: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class Direction:
    """How one direction reads in policies and in nftables.

    Attributes:
        policy_type: its name in ``policyTypes``.
        rules_key: the field of the spec that holds its rules.
        peers_key: the field of a rule that holds the other side.
        own_match: the packet field that holds the selected pod's address.
        peer_match: the packet field that holds the other side's address.
    """

    policy_type: str
    rules_key: str
    peers_key: str
    own_match: str
    peer_match: str


INGRESS = Direction("Ingress", "ingress", "from", own_match="daddr", peer_match="saddr")
EGRESS = Direction("Egress", "egress", "to", own_match="saddr", peer_match="daddr")


def ruleset(pods: Iterable[Object], namespaces: Iterable[Object], policies: Iterable[Object]) -> str:
    """The whole table as text for ``nft -f``, in an order that depends on the objects only."""
    namespace_labels = {n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in namespaces}
    active = sorted((pod for o in pods if (pod := read_pod(o)) is not None), key=lambda pod: pod.address)
    ordered = sorted(policies, key=lambda p: (p["metadata"]["namespace"], p["metadata"]["name"]))
    lines = [f"table inet {TABLE} {{"]
    for direction in (EGRESS, INGRESS):
        jumps = []
        for pod in active:
            selecting = [p for p in ordered if _selects(p, pod, direction)]
            if not selecting:
                continue
            chain = f"{direction.rules_key}_{pod.address.replace('.', '_')}"
            allowed = _allow_rules(selecting, pod, active, namespace_labels, direction)
            lines += _chain(chain, [*allowed, "counter drop"])
            jumps.append(f"{pod.address} : jump {chain}")
        dispatch = [f"ip {direction.own_match} vmap {{ {', '.join(jumps)} }}"] if jumps else []
        lines += _chain(direction.rules_key, dispatch)
    lines += _chain(
        "forward",
        [
            # After the filter priority, so that service addresses have long been translated to those of pods.
            "type filter hook forward priority 10; policy accept;",
            "ct state established,related accept",
            f"jump {EGRESS.rules_key}",
            f"jump {INGRESS.rules_key}",
        ],
    )
    return "\n".join([*lines, "}", ""])


def read_pod(pod: Object) -> Pod | None:
    """The parts of a Pod object that matter, or None for one without an address of its own."""
    status, spec = pod.get("status", {}), pod["spec"]
    address = status.get("podIP")
    if not address or spec.get("hostNetwork") or status.get("phase") not in ACTIVE_PHASES:
        return None
    containers = [*spec["containers"], *(spec.get("initContainers") or [])]
    ports = tuple(
        (port["name"], port.get("protocol", "TCP").lower(), port["containerPort"])
        for container in containers
        for port in container.get("ports") or []
        if port.get("name")
    )
    return Pod(pod["metadata"]["namespace"], pod["metadata"].get("labels") or {}, address, ports)


def selector_matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector (``matchLabels`` and ``matchExpressions``) accepts labels; an empty one accepts all."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or []:
        key, values = expression["key"], expression.get("values") or []
        accepted = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[expression["operator"]]
        if not accepted:
            return False
    return True


def policy_types(spec: Object) -> list[str]:
    """The directions that a policy restricts; unset means Ingress, and Egress when it has egress rules."""
    return list(spec.get("policyTypes") or (["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]))


def _selects(policy: Object, pod: Pod, direction: Direction) -> bool:
    return (
        policy["metadata"]["namespace"] == pod.namespace
        and direction.policy_type in policy_types(policy["spec"])
        and selector_matches(policy["spec"].get("podSelector") or {}, pod.labels)
    )


def _allow_rules(
    policies: Sequence[Object],
    pod: Pod,
    pods: Sequence[Pod],
    namespace_labels: dict[str, dict[str, str]],
    direction: Direction,
) -> list[str]:
    allowed = []
    for policy in policies:
        for rule in policy["spec"].get(direction.rules_key) or []:
            for addresses in _peer_matches(rule, policy["metadata"]["namespace"], pods, namespace_labels, direction):
                # A port's name means the receiver's port: the selected pod for ingress, any peer for egress.
                receivers = [pod] if direction is INGRESS else pods
                for port in _port_matches(rule.get("ports") or [], receivers):
                    allowed.append(" ".join(part for part in (addresses, port, "return") if part))
    return allowed


def _peer_matches(
    rule: Object,
    own_namespace: str,
    pods: Sequence[Pod],
    namespace_labels: dict[str, dict[str, str]],
    direction: Direction,
) -> list[str]:
    """One address match per peer of a rule; a rule without peers matches everything, a peer without pods nothing."""
    peers = rule.get(direction.peers_key)
    if not peers:
        return [""]
    matches = []
    for peer in peers:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            if ":" in block["cidr"]:
                continue
            match = f"ip {direction.peer_match} {block['cidr']}"
            if block.get("except"):
                match += f" ip {direction.peer_match} != {{ {', '.join(sorted(block['except']))} }}"
            matches.append(match)
            continue
        if "namespaceSelector" in peer:
            wanted = peer["namespaceSelector"]
            chosen = {name for name, labels in namespace_labels.items() if selector_matches(wanted, labels)}
        else:
            chosen = {own_namespace}
        selector = peer.get("podSelector") or {}
        addresses = [p.address for p in pods if p.namespace in chosen and selector_matches(selector, p.labels)]
        if addresses:
            matches.append(f"ip {direction.peer_match} {{ {', '.join(addresses)} }}")
    return matches


def _port_matches(ports: Sequence[Object], receivers: Sequence[Pod]) -> list[str]:
    """One match per allowed port; no ports means every port, a name that no receiver has means none."""
    if not ports:
        return [""]
    matches: list[str] = []
    for wanted in ports:
        protocol, port = wanted.get("protocol", "TCP").lower(), wanted.get("port")
        if port is None:
            matches.append(f"meta l4proto {protocol}")
        elif isinstance(port, int):
            matches.append(f"{protocol} dport {port}" + (f"-{wanted['endPort']}" if "endPort" in wanted else ""))
        else:
            for receiver in receivers:
                for name, port_protocol, number in receiver.named_ports:
                    if (name, port_protocol) == (port, protocol):
                        matches.append(f"ip daddr {receiver.address} {protocol} dport {number}")
    return list(dict.fromkeys(matches))


def _chain(name: str, rules: Sequence[str]) -> list[str]:
    return [f"  chain {name} {{", *(f"    {rule}" for rule in rules), "  }"]

"""A pod's report to the operator: which revision it enforces, and by which processes.

The gate serves it at `GET /v1/state?after=<revision>&wait=<seconds>` over mutual TLS: a long poll that returns once as
the acknowledged revision, a boot id, freshness or a tier's breaker differs from the state that `after` implies, or
after `wait` seconds. Its `ETag`, sent back as `If-None-Match`, names the last answer that the operator has seen. The
header `Kvstrata-Ack-Token` carries a token bound to the pod, with the audience `kvstrata-ack`: the operator has the API
server review it, so no pod can acknowledge for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.messages.engine_identity import Fingerprint
from kvstrata.contract.wire import Count, Message, shown, wired

ACK_AUDIENCE = "kvstrata-ack"
ACK_TOKEN_HEADER = "Kvstrata-Ack-Token"  # noqa: S105  (a header's name)
STATE_PATH = "/v1/state"
OPERATOR_COMMON_NAME = "kvstrata-operator"
CONTROL_PORT = 9443
MAX_PROBLEM_CHARACTERS = 256

MAX_REPORTED_USAGE = 512
"""Pairs of scope and tier that a pod reports to the operator, those with most bytes first."""


def gate_server_name(model: str, namespace: str) -> str:
    return f"gate.{model}.{namespace}.kvstrata.internal"


@wired("a pod's state", versioned=True, omit=("certificate", "lasting"))
class PodState(Message):
    """The enforced policy of one pod.

    `acked` is the highest revision such that the gate mints nothing older, removed keyspaces have no request left, and
    the adapter has acknowledged it; 0 before the first. `seen` is the newest complete revision read. `cache_boot` is
    empty while the cache server does not answer; an ack counts only for the boots named here. In `tiers` the one of
    medium CPU is the cache server's own memory; its breaker is closed while the memory's policy is enforced. `usage`
    lists scopes in that memory, largest first, at most `MAX_REPORTED_USAGE`; `usage_left_out` counts the rest.
    `tier_usage` lists scopes in shared tiers, at most as many: pods take turns, so each reports some, and several may
    report the same.

    New requests are served under `revision` of `term`; `root` is the digest of the bundle root, `model_uid` its
    CachedModel. They reveal an API server that was restored from a backup; empty without a policy in force.

    `keys_lacking` counts data keys that the policy names and the pod has not received (`key_delivery`).

    `fingerprint` and `facts` are the engine's (`engine_identity`). Until engine and cache server agree on the
    fingerprint, it is empty and the pod serves without reuse: `withheld` is the reason, `ungoverned` or
    `no_fingerprint`, and `unresolved` its message.

    `lasting`: the problem with API keys in `problem` lasts until a person corrects their Secret. `certificate` is why
    callers cannot be served, or soon not, with the certificate that the CachedModel names.
    """

    pod: str
    pod_uid: str
    namespace: str
    model: str
    identity: str
    gate_boot: str
    cache_boot: str
    term: int
    acked: Count
    seen: int
    fresh: bool
    fresh_age_ms: int
    engine_ready: bool
    problem: str = ""
    tiers: tuple[TierState, ...] = ()
    usage: tuple[ScopeUsage, ...] = ()
    usage_left_out: int = 0
    tier_usage: tuple[ScopeUsage, ...] = ()
    revision: int = 0
    root: str = ""
    model_uid: str = ""
    keys_lacking: int = 0
    fingerprint: Fingerprint = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    unresolved: str = ""
    withheld: str = ""
    certificate: str = ""
    lasting: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", shown(self.problem, MAX_PROBLEM_CHARACTERS))
        object.__setattr__(self, "unresolved", shown(self.unresolved, MAX_PROBLEM_CHARACTERS))
        object.__setattr__(self, "certificate", shown(self.certificate, MAX_PROBLEM_CHARACTERS))
        object.__setattr__(self, "usage_left_out", self.usage_left_out + len(self.usage[MAX_REPORTED_USAGE:]))
        object.__setattr__(self, "usage", self.usage[:MAX_REPORTED_USAGE])
        object.__setattr__(self, "tier_usage", self.tier_usage[:MAX_REPORTED_USAGE])

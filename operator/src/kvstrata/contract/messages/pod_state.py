"""What a pod tells the operator: which revision it enforces, and which processes say so.

The gate serves it at `GET /v1/state?after=<revision>&wait=<seconds>` over mutual TLS: a long poll that returns as
soon as the acknowledged revision, a boot id, freshness or a tier's breaker differs from what `after` implies, or after
`wait` seconds. Its `ETag`, sent back as `If-None-Match`, tells the gate which answer the operator has seen. The header
`Kvstrata-Ack-Token` carries a token that Kubernetes bound to the pod, with the audience `kvstrata-ack`: the operator
asks the API server whose it is, so no pod can acknowledge for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.wire import Count, Message, Wire, shown

ACK_AUDIENCE = "kvstrata-ack"
ACK_TOKEN_HEADER = "Kvstrata-Ack-Token"  # noqa: S105  (a header's name)
STATE_PATH = "/v1/state"
OPERATOR_COMMON_NAME = "kvstrata-operator"
CONTROL_PORT = 9443
MAX_PROBLEM_CHARACTERS = 256

MAX_TOLD_USAGE = 512
"""How many scopes and tiers a pod tells the operator of, those with most bytes first: pods are many."""


def gate_server_name(model: str, namespace: str) -> str:
    """Return the name that a model's gates prove by certificate to the operator."""
    return f"gate.{model}.{namespace}.kvstrata.internal"


@dataclass(frozen=True, slots=True)
class PodState(Message):
    """One pod's word on what it enforces.

    `acked` is the highest revision of which the gate mints nothing older, whose removed keyspaces have no request
    left, and which the adapter acknowledged; 0 before the first. `seen` is the newest complete revision read.
    `cache_boot` is empty while the cache server does not answer; an ack counts for the boots named here only.
    `tiers` names the tiers that the cache server has under its policy; the one of medium CPU is its own memory, and its
    breaker is closed while the memory's policy is enforced. `usage` is what scopes hold in that memory, largest first,
    `MAX_TOLD_USAGE` of them; `usage_left_out` is how many more hold something. `tier_usage` is what scopes hold in
    shared tiers, as many at the most: pods look at them in turns, so each tells of some, and several of the same.

    `revision` of `term` is what new requests are served under, `root` the digest of the root's bytes that said so, and
    `model_uid` the CachedModel that it was for: they tell an API server that was restored from a backup what it has
    forgotten. Without a policy in force they say nothing.

    `keys_lacking` is how many data keys that policy names which the pod has not been brought (`keydelivery`).
    """

    WIRE: ClassVar[Wire] = Wire("a pod's state", versioned=True)

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

    def __post_init__(self) -> None:
        """Keep as much as may be shown: of its problem, and of the scopes that use most."""
        object.__setattr__(self, "problem", shown(self.problem, MAX_PROBLEM_CHARACTERS))
        object.__setattr__(self, "usage_left_out", self.usage_left_out + len(self.usage[MAX_TOLD_USAGE:]))
        object.__setattr__(self, "usage", self.usage[:MAX_TOLD_USAGE])
        object.__setattr__(self, "tier_usage", self.tier_usage[:MAX_TOLD_USAGE])

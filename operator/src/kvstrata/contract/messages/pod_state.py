"""What a pod tells the operator: which revision it enforces, and which processes say so.

The gate serves it at `GET /v1/state?after=<revision>&wait=<seconds>` over mutual TLS: a long poll that returns as
soon as the acknowledged revision, a boot id, freshness or a tier's breaker differs from what `after` implies, or after
`wait` seconds. Its `ETag`, sent back as `If-None-Match`, tells the gate which answer the operator has seen. The header
`Kvstrata-Ack-Token` carries a token that Kubernetes bound to the pod, with the audience `kvstrata-ack`: the operator
asks the API server whose it is, so no pod can acknowledge for another.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvstrata.contract import CONTRACT_VERSION, MALFORMED, ContractError, require_version
from kvstrata.contract.messages.adapter import SCOPE_DIGITS, ScopeUsage, TierState
from kvstrata.contract.wire import canonical_json

ACK_AUDIENCE = "kvstrata-ack"
ACK_TOKEN_HEADER = "Kvstrata-Ack-Token"  # noqa: S105  (a header's name)
STATE_PATH = "/v1/state"
OPERATOR_COMMON_NAME = "kvstrata-operator"
CONTROL_PORT = 9443
MAX_PROBLEM_CHARACTERS = 256

MAX_TOLD_USAGE = 512
"""How many scopes and tiers a pod tells the operator of, those with most bytes first: pods are many."""

MAX_TIER_CHARACTERS = 253
MAX_FIGURE = 1 << 62
"""More bytes than anything holds: what is shown in status has to stay short, whatever a pod says."""

_SCOPE = re.compile(rf"[0-9a-f]{{0,{SCOPE_DIGITS}}}")
_ROWS = ("tiers", "usage", "tier_usage")


def gate_server_name(model: str, namespace: str) -> str:
    """Return the name that a model's gates prove by certificate to the operator."""
    return f"gate.{model}.{namespace}.kvstrata.internal"


@dataclass(frozen=True, slots=True)
class PodState:
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
    forgotten. Without a policy in force, and from a gate of the version before, they say nothing.

    `keys_lacking` is how many data keys that policy names which the pod has not been brought (`keydelivery`).
    """

    pod: str
    pod_uid: str
    namespace: str
    model: str
    identity: str
    gate_boot: str
    cache_boot: str
    term: int
    acked: int
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

    def encode(self) -> bytes:
        """Return the wire form, canonical JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _ROWS}
        tiers = [{n: getattr(tier, n) for n in TierState.__dataclass_fields__} for tier in self.tiers]
        fields["usage_left_out"] += len(self.usage[MAX_TOLD_USAGE:])
        usage = [row.to_json() for row in self.usage[:MAX_TOLD_USAGE]]
        shared = [row.to_json() for row in self.tier_usage[:MAX_TOLD_USAGE]]
        rows = {"tiers": tiers, "usage": usage, "tier_usage": shared}
        return canonical_json({"contract": CONTRACT_VERSION, **fields, **rows})

    @classmethod
    def decode(cls, data: bytes) -> PodState:
        """Read the wire form. Raises ContractError for anything malformed or of an unknown version."""
        try:
            raw: dict[str, Any] = json.loads(data)
            require_version(raw, "a pod's state")
            # A gate of the version before tells neither usage nor what it holds.
            raw = {
                "usage": [],
                "usage_left_out": 0,
                "tier_usage": [],
                "revision": 0,
                "root": "",
                "model_uid": "",
                "keys_lacking": 0,
                **raw,
            }
            fields = {name: raw[name] for name in cls.__dataclass_fields__ if name not in _ROWS}
            fields["problem"] = shown(fields["problem"])
            if type(fields["usage_left_out"]) is int:
                fields["usage_left_out"] += len(raw["usage"][MAX_TOLD_USAGE:])
            usage = tuple(_use(row) for row in raw["usage"][:MAX_TOLD_USAGE])
            shared = tuple(_use(row) for row in raw["tier_usage"][:MAX_TOLD_USAGE])
            tiers = tuple(TierState.from_json(tier) for tier in raw["tiers"])
            state = cls(**fields, tiers=tiers, usage=usage, tier_usage=shared)
            if not (_well_typed(state) and all(map(_well_typed, state.tiers)) and state.acked >= 0):
                raise ContractError("a pod's state has a field of the wrong type")
            return state
        except ContractError:
            raise
        except MALFORMED as error:
            raise ContractError(f"a pod's state is malformed: {error!r}") from error


def shown(text: object) -> object:
    """Return what may be shown of a pod's own words: printable, and not long."""
    if not isinstance(text, str):
        return text
    return "".join(character for character in text[:MAX_PROBLEM_CHARACTERS] if character.isprintable())


def _use(raw: Any) -> ScopeUsage:
    """Read a row of usage. Raises ContractError unless each field is what it says; a pod's figures are shown."""
    scope, tier, *figures = raw
    named = isinstance(scope, str) and _SCOPE.fullmatch(scope) and isinstance(tier, str)
    if not named or len(tier) > MAX_TIER_CHARACTERS or not tier.isprintable():
        raise ContractError("a pod's state tells the use of something that is no scope or no tier")
    counted, bounds = figures[:2], [bound for bound in figures[2:4] if bound is not None]
    if not all(type(figure) is int and 0 <= figure <= MAX_FIGURE for figure in (*counted, *bounds)):
        raise ContractError("a pod's state tells a use that is no number of bytes or blocks")
    return ScopeUsage.from_json(raw)


_TYPES = {"str": str, "int": int, "bool": bool}


def _well_typed(value: PodState | TierState) -> bool:
    """Whether every plain field has exactly its declared type: what a pod says is compared and shown unchecked."""
    declared = {name: _TYPES.get(str(field.type)) for name, field in value.__dataclass_fields__.items()}
    return all(kind is None or type(getattr(value, name)) is kind for name, kind in declared.items())

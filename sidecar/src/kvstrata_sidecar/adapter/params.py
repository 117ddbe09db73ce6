"""Start parameters of the adapter: `adapter_params` of LMCache's `--l2-adapter`, and those of the server module.

LMCache prints them on its configuration endpoint, so they name files that hold secrets, never a secret. Malformed
parameters raise ValueError and stop the server: a cache server that ignores its policy must not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Annotated, Any, Self, TypeVar

from kvstrata.contract import ContractError
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.contract.wire import MAX_NUMBER, Form, Items, Range, from_wire, wired

T = TypeVar("T")

_PLACE = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"

DEFAULT_HIGH_WATERMARK_PERCENT = 90

MAX_STORE_DEADLINE_MS = 120_000
"""LMCache reuses a block's memory 300 s after it lent it to a store; a store has to end long before."""

Positive = Annotated[int, Range(1, MAX_NUMBER)]
Hex16 = Annotated[str, Form("[0-9a-f]{16}", "text of 16 lower-case hexadecimal digits")]
AbsolutePath = Annotated[str, Form("/.*", "absolute path")]


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class TlsParams:
    """TLS of a tier's servers: the CA file, and the name in their certificates. Without `server_name` it is the
    endpoint's host; for a cluster's server, the name that it announces, or its address. The file is read at every
    connect."""

    ca_file: str
    server_name: str | None = None


@wired("tier", closed=True)
class _CommonParams:
    """Parameters of tiers of all media. `encryption` is `Required` or `Disabled`; a tier that requires it serves only
    keyspaces with a data key. `workers` carry blocks."""

    name: str
    _: KW_ONLY
    workers: Positive = 4
    encryption: Annotated[str, Form("Required|Disabled", "choice of Required and Disabled")] = "Disabled"
    load_deadline_ms: Positive = 5_000
    store_deadline_ms: Annotated[int, Range(1, MAX_STORE_DEADLINE_MS)] = 30_000

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """Raises ValueError for missing, unknown or malformed parameters."""
        return read(cls, raw)

    @property
    def encrypts(self) -> bool:
        return self.encryption == "Required"


@dataclass(frozen=True, slots=True)
class TierParams(_CommonParams):
    """One Redis tier. Without `endpoints`, servers, capacity and default life are in the policy's rules of the tier;
    otherwise the parameters count: those of an operator of the former version have them all. `endpoints` are tried in
    order.

    `cluster`: the endpoints belong to a Redis Cluster and report its other servers. `password_file` is read at every
    connect, so that a rotated password needs no restart. `default_ttl_s` applies where the policy has no retention for
    this tier. `workers` are connections; one more is kept for lookups, so that a large block never delays them; in a
    cluster each has a connection to every server. `capacity_bytes` bounds all scopes together; without it limits hold,
    but no guarantees. `allowed` limits servers, None for any.
    """

    endpoints: Annotated[tuple[Endpoint, ...], Items(1)] = ()
    cluster: bool = False
    tls: TlsParams | None = None
    username: str | None = None
    password_file: str | None = None
    default_ttl_s: Positive = 86_400
    capacity_bytes: Positive | None = None
    connect_timeout_ms: Positive = 500
    io_timeout_ms: Positive = 1_000
    lookup_deadline_ms: Positive = 250
    allowed: AllowedServers | None = None


@dataclass(frozen=True, slots=True)
class FileTierParams(_CommonParams):
    """One tier of files in `directory`, which belongs to this cache server alone.

    `capacity_bytes` bounds all files together and `max_blocks` their number: the index is in memory.
    `free_floor_percent` of the file system stay free. `default_ttl_s` applies where the policy has no retention for
    this tier, None for as long as there is room. `place` is the model's name where the pods of a node share
    `directory`; each then finds its own place. Lookups have no deadline, because they touch no disk.
    """

    directory: AbsolutePath
    capacity_bytes: Positive
    max_blocks: Positive
    free_floor_percent: Annotated[int, Range(0, 99)] = 2
    place: Annotated[str, Form(_PLACE, "name of a model")] | None = None
    default_ttl_s: Positive | None = None

    def __post_init__(self) -> None:
        if self.place is not None and not re.fullmatch(_PLACE, self.name):
            raise ContractError("tier.name must be the name of a directory, too")


@wired("adapter_params", closed=True)
class AdapterParams:
    """`domain` and `identity` are 16 hexadecimal digits, the first parts of every key. `tier` may be None."""

    domain: Hex16
    identity: Hex16
    tier: TierParams | FileTierParams | None
    policy_dir: str = "/run/kvstrata/policy"
    link_dir: str = "/run/kvstrata/link"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AdapterParams:
        """Raises ValueError for missing, unknown or malformed parameters. A tier without `medium` is in Redis."""
        tier = raw.get("tier", "")
        if tier is not None and not isinstance(tier, Mapping):
            raise ValueError("adapter_params must have a tier: an object, or null for none")
        pod = read(cls, {**raw, "tier": None})
        if tier is None:
            return pod
        values = dict(tier)
        medium = values.pop("medium", "Redis")
        if medium == "NVMe":
            return replace(pod, tier=FileTierParams.from_json(values))
        if medium != "Redis":
            raise ValueError(f"tier.medium must be Redis or NVMe, not {medium!r}")
        return replace(pod, tier=TierParams.from_json(values))


@dataclass(frozen=True, slots=True)
class MemoryParams:
    """`config` of LMCache's `--server-module`: the pod's parameters, and the CPU tier. `tier` is the CacheTier whose
    budgets apply to the server's memory, None without one. Blocks are evicted above `high_watermark_percent` of the
    memory."""

    pod: AdapterParams
    tier: str | None
    high_watermark_percent: int = DEFAULT_HIGH_WATERMARK_PERCENT

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MemoryParams:
        """Raises ValueError for anything missing, unknown or out of bounds."""
        if "tier" not in raw:
            raise ValueError("MemoryParams: missing ['tier']; null is a model without a CPU tier")
        values = dict(raw)
        tier = values.pop("tier")
        percent = values.pop("high_watermark_percent", DEFAULT_HIGH_WATERMARK_PERCENT)
        if tier is not None and (not isinstance(tier, str) or not tier):
            raise ValueError(f"tier must be a CacheTier's name or null, not {tier!r}")
        if not isinstance(percent, int) or isinstance(percent, bool) or not 10 <= percent <= 100:
            raise ValueError(f"high_watermark_percent must be an integer from 10 to 100, not {percent!r}")
        return cls(AdapterParams.from_json({**values, "tier": None}), tier, percent)


def read(cls: type[T], raw: Any) -> T:
    """Raises ValueError for missing, unknown or malformed fields."""
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if isinstance(raw, dict) and (unknown := sorted(raw.keys() - known)):
        raise ValueError(f"{cls.__name__}: unknown {unknown}")
    return from_wire(cls, raw)

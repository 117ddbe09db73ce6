"""Start parameters of the adapter: `adapter_params` of LMCache's `--l2-adapter`.

LMCache prints them on its configuration endpoint, so they name files that hold secrets, never a secret. Malformed
parameters raise ValueError and stop the server: a cache server that ignores its policy must not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

_HEX16 = re.compile(r"[0-9a-f]{16}")

_PLACE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

MAX_STORE_DEADLINE_MS = 120_000
"""LMCache reuses a block's memory 300 s after it lent it to a store; a store has to end long before."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsParams:
    """TLS of a tier's servers: the CA file, and the name in their certificates.

    Without `server_name` it is the endpoint's host; for a cluster's server, the name that it announces, or its address.
    `cert_file` and `key_file` are the client's certificate, if servers require one. All files are read at every
    connect.
    """

    ca_file: str
    server_name: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class TierParams:
    """One Redis tier. `endpoints` are tried in order.

    `cluster`: the endpoints belong to a Redis Cluster and report its other servers. `password_file` is read at every
    connect, so that a rotated password needs no restart. `default_ttl_s` applies where the policy has no retention for
    this tier. `workers` connections carry blocks; one more is kept for lookups, so that a large block never delays
    them; in a cluster each has a connection to every server. `queue_limit` bounds the waiting batches of up to 16
    blocks and `queue_limit_bytes` their bytes, each for loads and for stores. `capacity_bytes` bounds all scopes
    together; without it limits hold, but no guarantees. `encryption` is `Required` or `Disabled`; a tier that requires
    it serves only keyspaces with a data key.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    cluster: bool = False
    tls: TlsParams | None = None
    username: str | None = None
    password_file: str | None = None
    default_ttl_s: int = 86_400
    workers: int = 4
    queue_limit: int = 8_192
    queue_limit_bytes: int = 16 << 30
    capacity_bytes: int | None = None
    encryption: str = "Disabled"
    connect_timeout_ms: int = 500
    io_timeout_ms: int = 1_000
    lookup_deadline_ms: int = 250
    load_deadline_ms: int = 5_000
    store_deadline_ms: int = 30_000

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TierParams:
        """Raises ValueError for fields that are missing, unknown or out of bounds."""
        values = _known(cls, raw)
        endpoints = values["endpoints"]
        if not isinstance(endpoints, list) or not endpoints:
            raise ValueError("tier.endpoints must name at least one endpoint")
        values["endpoints"] = tuple(Endpoint(**_known(Endpoint, endpoint)) for endpoint in endpoints)
        if values.get("tls") is not None:
            values["tls"] = TlsParams(**_known(TlsParams, values["tls"]))
            if (values["tls"].cert_file is None) != (values["tls"].key_file is None):
                raise ValueError("tier.tls needs both cert_file and key_file, or neither")
        tier = cls(**values)
        _require_positive(tier, "default_ttl_s", "workers", "queue_limit", "queue_limit_bytes", *_durations(cls))
        if tier.capacity_bytes is not None:
            _require_positive(tier, "capacity_bytes")
        if type(tier.cluster) is not bool:
            raise ValueError(f"tier.cluster must be true or false, not {tier.cluster!r}")
        _require_common(tier)
        return tier

    @property
    def encrypts(self) -> bool:
        return self.encryption == "Required"


@dataclass(frozen=True, slots=True)
class FileTierParams:
    """One tier of files in `directory`, which belongs to this cache server alone.

    `capacity_bytes` bounds all files together and `max_blocks` their number: the index is in memory.
    `free_floor_percent` of the file system stay free. `default_ttl_s` applies where the policy has no retention for
    this tier, None for as long as there is room. `place` is the model's name where the pods of a node share
    `directory`; each then finds its own place. The rest is as in TierParams; lookups have no deadline, because they
    touch no disk.
    """

    name: str
    directory: Path
    capacity_bytes: int
    max_blocks: int
    free_floor_percent: int = 2
    place: str | None = None
    default_ttl_s: int | None = None
    workers: int = 4
    queue_limit: int = 8_192
    queue_limit_bytes: int = 16 << 30
    encryption: str = "Disabled"
    load_deadline_ms: int = 5_000
    store_deadline_ms: int = 30_000

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FileTierParams:
        """Raises ValueError for fields that are missing, unknown or out of bounds."""
        values = _known(cls, raw)
        if not isinstance(values["directory"], str) or not values["directory"].startswith("/"):
            raise ValueError(f"tier.directory must be an absolute path, not {values['directory']!r}")
        values["directory"] = Path(values["directory"])
        tier = cls(**values)
        _require_positive(
            tier, "capacity_bytes", "max_blocks", "workers", "queue_limit", "queue_limit_bytes", *_durations(cls)
        )
        if tier.default_ttl_s is not None:
            _require_positive(tier, "default_ttl_s")
        if type(tier.free_floor_percent) is not int or not 0 <= tier.free_floor_percent < 100:
            raise ValueError(f"tier.free_floor_percent must be from 0 to 99, not {tier.free_floor_percent!r}")
        if tier.place is not None and (not isinstance(tier.place, str) or not _PLACE.fullmatch(tier.place)):
            raise ValueError(f"tier.place must be a model's name, not {tier.place!r}")
        if tier.place is not None and not _PLACE.fullmatch(tier.name):
            raise ValueError(f"tier.name must be the name of a directory, too, not {tier.name!r}")
        _require_common(tier)
        return tier

    @property
    def encrypts(self) -> bool:
        return self.encryption == "Required"


@dataclass(frozen=True, slots=True)
class AdapterParams:
    """`domain` and `identity` are 16 hexadecimal digits, the first parts of every key. `tier` may be None."""

    domain: str
    identity: str
    tier: TierParams | FileTierParams | None
    policy_dir: Path = Path("/run/kvstrata/policy")
    link_dir: Path = Path("/run/kvstrata/link")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> AdapterParams:
        """Raises ValueError for fields that are missing, unknown or malformed."""
        values = _known(cls, raw)
        for name in ("domain", "identity"):
            if not isinstance(values[name], str) or not _HEX16.fullmatch(values[name]):
                raise ValueError(f"{name} must be 16 lower-case hexadecimal digits")
        for name in ("policy_dir", "link_dir"):
            if name in values:
                values[name] = Path(values[name])
        if values["tier"] is not None:
            values["tier"] = _tier(values["tier"])
        return cls(**values)


def _tier(raw: Any) -> TierParams | FileTierParams:
    """A tier without `medium` is in Redis."""
    if not isinstance(raw, Mapping):
        raise ValueError("tier must be an object or null")
    values = dict(raw)
    medium = values.pop("medium", "Redis")
    if medium == "NVMe":
        return FileTierParams.from_json(values)
    if medium != "Redis":
        raise ValueError(f"tier.medium must be Redis or NVMe, not {medium!r}")
    return TierParams.from_json(values)


def _require_positive(tier: TierParams | FileTierParams, *names: str) -> None:
    for name in names:
        value = getattr(tier, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"tier.{name} must be a positive integer, not {value!r}")


def _require_common(tier: TierParams | FileTierParams) -> None:
    if tier.encryption not in ("Required", "Disabled"):
        raise ValueError(f"tier.encryption must be Required or Disabled, not {tier.encryption!r}")
    if tier.store_deadline_ms > MAX_STORE_DEADLINE_MS:
        raise ValueError(f"tier.store_deadline_ms must be at most {MAX_STORE_DEADLINE_MS}")


def _durations(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.name.endswith("_ms"))


def _known(cls: Any, raw: Any) -> dict[str, Any]:
    """Return `raw` as constructor arguments of the dataclass `cls`; a ValueError names the offending fields."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{cls.__name__} must be an object")
    names = {field.name for field in fields(cls)}
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    unknown, missing = sorted(set(raw) - names), sorted(required - set(raw))
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: unknown {unknown}, missing {missing}")
    return dict(raw)

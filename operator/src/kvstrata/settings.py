"""The operator's settings: the one place that reads the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from itertools import permutations
from pathlib import PurePosixPath
from typing import Any

from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.keys import AllowedService
from kvstrata.objects.context import BuildContext

PLACEMENT = frozenset({"nodeSelector", "tolerations", "affinity", "priorityClassName"})
"""Fields of a pod's spec for its placement."""

SERVICE = {name: name for name in ("address", "authority", "namespace", "role")} | {"authMount": "auth_mount"}
"""Fields of a key management service, and their names in `AllowedService`."""


class SettingsError(ValueError):
    """The environment is incomplete or malformed; the message names the variable and the fix."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`build` is complete but for `service_monitors`."""

    namespace: str
    pod_name: str
    release: str
    watch_namespaces: tuple[str, ...]
    build: BuildContext
    log_level: str
    http_port: int
    workers: int
    resync_s: float
    watch_silence_s: float
    kms_services: tuple[AllowedService, ...]
    kms_token_file: str
    receipts_key_days: float
    external_redis: AllowedServers
    host_paths: tuple[str, ...]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Raises SettingsError for a missing or malformed variable."""
        env = os.environ if environment is None else environment

        def required(name: str) -> str:
            value = env.get(name, "").strip()
            if not value:
                raise SettingsError(f"{name} is not set; the chart sets it, by hand export it before the start")
            return value

        def number(name: str, default: str) -> float:
            try:
                return float(env.get(name) or default)
            except ValueError as error:
                raise SettingsError(f"{name} must be a number, not {env[name]!r}") from error

        def percent(name: str, default: str) -> int:
            value = number(name, default)
            if not 0 <= value < 100:
                raise SettingsError(f"{name} must be from 0 to 99, not {env[name]!r}")
            return int(value)

        def listed(name: str) -> tuple[str, ...]:
            return tuple(sorted({one.strip() for one in env.get(name, "").split(",") if one.strip()}))

        def parsed(name: str, default: str) -> Any:
            try:
                return json.loads(env.get(name) or default)
            except ValueError as error:
                raise SettingsError(f"{name} must be JSON: {error}") from error

        def placement(name: str) -> Mapping[str, Any]:
            value = parsed(name, "{}")
            if not isinstance(value, dict) or value.keys() - PLACEMENT:
                raise SettingsError(f"{name} must be an object with no fields but {', '.join(sorted(PLACEMENT))}")
            return value

        namespace = required("KVSTRATA_NAMESPACE")
        return cls(
            namespace=namespace,
            pod_name=required("KVSTRATA_POD_NAME"),
            release=env.get("KVSTRATA_RELEASE") or "",
            watch_namespaces=listed("KVSTRATA_WATCH_NAMESPACES"),
            build=BuildContext(
                sidecar_image=required("KVSTRATA_SIDECAR_IMAGE"),
                redis_image=required("KVSTRATA_REDIS_IMAGE"),
                image_pull_policy=env.get("KVSTRATA_IMAGE_PULL_POLICY") or "IfNotPresent",
                operator_namespace=namespace,
                cluster_domain=env.get("KVSTRATA_CLUSTER_DOMAIN") or "cluster.local",
                nodefs_reserve_percent=percent("KVSTRATA_NODEFS_RESERVE_PERCENT", "11"),
                image_pull_secrets=listed("KVSTRATA_IMAGE_PULL_SECRETS"),
                job_placement=placement("KVSTRATA_JOB_PLACEMENT"),
                job_resources=parsed("KVSTRATA_JOB_RESOURCES", "{}"),
                metrics_from=tuple(parsed("KVSTRATA_METRICS_FROM", "[]")),
                run_as=parsed("KVSTRATA_RUN_AS", "65532"),
                egress_ports=tuple(parsed("KVSTRATA_EGRESS_PORTS", "[]")),
                child_labels=parsed("KVSTRATA_CHILD_LABELS", "{}"),
                child_annotations=parsed("KVSTRATA_CHILD_ANNOTATIONS", "{}"),
            ),
            log_level=(env.get("KVSTRATA_LOG_LEVEL") or "INFO").upper(),
            http_port=int(number("KVSTRATA_HTTP_PORT", "8080")),
            workers=int(number("KVSTRATA_WORKERS", "16")),
            resync_s=number("KVSTRATA_RESYNC_SECONDS", "600"),
            watch_silence_s=number("KVSTRATA_WATCH_SILENCE_SECONDS", "70"),
            kms_services=_services("KVSTRATA_KMS_ADDRESSES", parsed("KVSTRATA_KMS_ADDRESSES", "[]")),
            kms_token_file=env.get("KVSTRATA_KMS_TOKEN_FILE") or "",
            receipts_key_days=number("KVSTRATA_RECEIPTS_KEY_DAYS", "365"),
            external_redis=_servers(parsed("KVSTRATA_EXTERNAL_REDIS", "{}"), env.get("KUBERNETES_SERVICE_HOST", "")),
            host_paths=_folders(listed("KVSTRATA_HOST_PATHS")),
        )


def _folders(given: tuple[str, ...]) -> tuple[str, ...]:
    for one, other in permutations(given, 2):
        if PurePosixPath(one).is_relative_to(other):
            raise SettingsError(f"KVSTRATA_HOST_PATHS: {one} is in {other}, and may be a namespace's folder there")
    return given


def _servers(given: Any, api_server: str) -> AllowedServers:
    fields = {"hosts": [], "cidrs": [], "plainPasswords": False}
    try:
        hosts, cidrs, plain = {**fields, **given}.values()
        networks = tuple(str(ip_network(one)) for one in cidrs)
        names = tuple(one.lower() for one in hosts)
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"KVSTRATA_EXTERNAL_REDIS must have {', '.join(fields)}: {error}") from error
    is_address = ":" in api_server or api_server.replace(".", "").isdigit()
    return AllowedServers(names, networks, (api_server,) if is_address else (), plain_passwords=plain is True)


def _services(name: str, listed: Any) -> tuple[AllowedService, ...]:
    found = []
    for one in listed if isinstance(listed, list) else [listed]:
        entry = {"address": one} if isinstance(one, str) else one
        if not isinstance(entry, dict) or "address" not in entry or entry.keys() - SERVICE.keys():
            raise SettingsError(f"{name} must be a list of addresses, or of objects with {', '.join(SERVICE)}")
        if not all(isinstance(text, str) and text for text in entry.values()):
            raise SettingsError(f"{name} must have texts as values of a service")
        found.append(AllowedService(**{SERVICE[field]: text for field, text in entry.items()}))
    return tuple(found)

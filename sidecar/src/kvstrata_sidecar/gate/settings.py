"""Settings of the gate: environment variables, each also a flag."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import get_type_hints


class SettingsError(ValueError):
    """A setting is missing or invalid; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`KVSTRATA_MODEL` is `--model`; names in `_ENVIRONMENT` differ from that rule.

    `model` is the CachedModel's name, `served_model` the `model` in requests (default: the same). A port of -1 switches
    that listener off, 0 takes any free one; `cache_http_port` is that of LMCache's pages. `render_id` identifies how
    prefixes become tokens. `cors_origins` has those of browsers that may call, separated by commas.
    """

    pod_name: str
    pod_uid: str
    pod_namespace: str
    model: str
    identity: str
    bundle_secret: str
    render_id: str = ""
    api_keys_secret: str = ""
    served_model: str = ""
    engine_socket: Path = Path("/run/kvstrata/engine/engine.sock")
    policy_dir: Path = Path("/run/kvstrata/policy")
    adapter_socket: Path = Path("/run/kvstrata/link/adapter.sock")
    bind: str = "::"
    https_port: int = 8443
    http_port: int = -1
    control_port: int = 9443
    health_port: int = 8081
    cache_http_port: int = 5556
    tls_dir: Path = Path("/etc/kvstrata/gate-tls")
    control_tls_dir: Path = Path("/etc/kvstrata/gate-tls")
    ack_token_file: Path = Path("/var/run/secrets/kvstrata/ack/token")
    kube_host: str = ""
    kube_port: int = 443
    kube_token_file: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    kube_ca_file: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
    kube_tls: bool = True
    max_body_bytes: int = 8 * 1024 * 1024
    max_in_flight: int = 1024
    max_in_flight_per_tenant: int = 512
    max_connections: int = 2048
    max_connections_per_address: int = 1024
    max_handshakes: int = 256
    idle_timeout_s: float = 75.0
    cors_origins: str = ""
    metrics_tenants: int = 200
    drain_grace_s: float = 5.0
    memory_patience_s: float = 5.0
    shutdown_s: float = 30.0


_ENVIRONMENT = {
    "pod_name": "POD_NAME",
    "pod_uid": "POD_UID",
    "pod_namespace": "POD_NAMESPACE",
    "kube_host": "KUBERNETES_SERVICE_HOST",
    "kube_port": "KUBERNETES_SERVICE_PORT",
}


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Return the settings: a flag, else the environment variable, else the default. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog="kvstrata-gate", description="The gate before an engine.")
    for field in fields(Settings):
        parser.add_argument("--" + field.name.replace("_", "-"), help=f"or {variable(field.name)}")
    given = vars(parser.parse_args(arguments))
    types = get_type_hints(Settings)
    values: dict[str, object] = {}
    for field in fields(Settings):
        text = given[field.name] if given[field.name] is not None else environment.get(variable(field.name))
        if text is not None:
            values[field.name] = _convert(field.name, text, types[field.name])
    required = [field.name for field in fields(Settings) if field.default is MISSING]
    missing = [variable(name) for name in (*required, "kube_host") if not values.get(name)]
    if missing:
        raise SettingsError(f"not set: {', '.join(missing)}")
    values.setdefault("served_model", values["model"])
    return Settings(**values)  # type: ignore[arg-type]


def variable(name: str) -> str:
    return _ENVIRONMENT.get(name, f"KVSTRATA_{name.upper()}")


def _convert(name: str, text: str, kind: type) -> object:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise SettingsError(f"{variable(name)} is not a {kind.__name__}: {text!r}") from None

"""The gate container: the only one that callers reach, and the only one with an API server token."""

from __future__ import annotations

from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.common import TlsMode
from kvstrata.contract.messages.adapter import SOCKET_NAME
from kvstrata.contract.messages.pod_state import CONTROL_PORT
from kvstrata.objects import names, paths, sizing
from kvstrata.objects.container import amounts, chosen_amounts, container, environment, field_environment, mount
from kvstrata.objects.context import BuildContext
from kvstrata.objects.pod.identity import render_id
from kvstrata.objects.quantities import binary

LISTENER_OFF = -1
"""Port number that disables a listener of the gate."""


def build_container(
    ctx: BuildContext, model: CachedModel, identity: str, limit_bytes: int = sizing.GATE_LIMIT_BYTES
) -> dict[str, Any]:
    """Return the native sidecar `gate`. Its readiness is the pod's, because it answers for the engine. `limit_bytes` is
    its memory limit, unless the model sets one."""
    default = amounts({"cpu": "100m", "memory": binary(sizing.GATE_REQUEST_BYTES)}, {"memory": binary(limit_bytes)})
    return container(
        "gate",
        ctx.sidecar_image,
        ctx.image_pull_policy,
        restartPolicy="Always",
        command=["kvstrata-gate"],
        env=[
            field_environment("POD_NAME", "metadata.name"),
            field_environment("POD_UID", "metadata.uid"),
            field_environment("POD_NAMESPACE", "metadata.namespace"),
            *environment(_variables(model, identity)),
        ],
        ports=[
            {"name": caller_port_name(model), "containerPort": caller_port(model), "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": paths.HEALTH_PORT, "protocol": "TCP"},
        ],
        startupProbe=_probe("/livez", period_s=1, timeout_s=2, failures=60),
        livenessProbe=_probe("/livez", period_s=10, timeout_s=5, failures=3),
        readinessProbe=_probe("/readyz", period_s=2, timeout_s=2, failures=2),
        resources=chosen_amounts(model.spec.gate.resources, default),
        volumeMounts=_mounts(model),
    )


def _probe(path: str, *, period_s: int, timeout_s: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": paths.HEALTH_PORT, "scheme": "HTTP"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": timeout_s, "failureThreshold": failures}


def caller_port_name(model: CachedModel) -> str:
    return "http" if model.spec.gate.tls.mode is TlsMode.DISABLED else "https"


def caller_port(model: CachedModel) -> int:
    return paths.HTTP_PORT if model.spec.gate.tls.mode is TlsMode.DISABLED else paths.HTTPS_PORT


def _variables(model: CachedModel, identity: str) -> dict[str, str]:
    mode = model.spec.gate.tls.mode
    port = caller_port(model)
    origins, limits = model.spec.gate.allowed_origins, model.spec.gate.limits
    return {
        "KVSTRATA_MODEL": model.name,
        "KVSTRATA_SERVED_MODEL": model.spec.model.name,
        "KVSTRATA_IDENTITY": identity,
        "KVSTRATA_RENDER_ID": render_id(model),
        "KVSTRATA_BUNDLE_SECRET": names.bundle_root(model.name),
        "KVSTRATA_API_KEYS_SECRET": model.api_keys_secret,
        **({"KVSTRATA_CORS_ORIGINS": ",".join(origins)} if origins else {}),
        "KVSTRATA_MAX_BODY_BYTES": str(limits.max_body_bytes),
        "KVSTRATA_IDLE_TIMEOUT_S": str(limits.idle_timeout.in_seconds),
        "KVSTRATA_MAX_CONNECTIONS": str(limits.max_connections),
        "KVSTRATA_MAX_CONNECTIONS_PER_ADDRESS": str(limits.max_connections_per_address),
        "KVSTRATA_MAX_IN_FLIGHT": str(limits.max_in_flight),
        "KVSTRATA_MAX_IN_FLIGHT_PER_TENANT": str(limits.max_in_flight_per_tenant or -(-limits.max_in_flight // 2)),
        "KVSTRATA_METRICS_TENANTS": str(limits.metrics_tenants),
        "KVSTRATA_ENGINE_SOCKET": paths.ENGINE_SOCKET,
        "KVSTRATA_POLICY_DIR": paths.POLICY,
        "KVSTRATA_ADAPTER_SOCKET": f"{paths.LINK}/{SOCKET_NAME}",
        "KVSTRATA_HTTPS_PORT": str(LISTENER_OFF if mode is TlsMode.DISABLED else port),
        "KVSTRATA_HTTP_PORT": str(port if mode is TlsMode.DISABLED else LISTENER_OFF),
        "KVSTRATA_CONTROL_PORT": str(CONTROL_PORT),
        "KVSTRATA_HEALTH_PORT": str(paths.HEALTH_PORT),
        "KVSTRATA_CACHE_HTTP_PORT": str(paths.CACHE_HTTP_PORT),
        "KVSTRATA_TLS_DIR": paths.CALLER_TLS if mode is TlsMode.SECRET else paths.GATE_TLS,
        "KVSTRATA_CONTROL_TLS_DIR": paths.GATE_TLS,
        "KVSTRATA_ACK_TOKEN_FILE": f"{paths.ACK_TOKEN}/token",
        "KVSTRATA_KUBE_TOKEN_FILE": f"{paths.KUBE_TOKEN}/token",
        "KVSTRATA_KUBE_CA_FILE": f"{paths.KUBE_TOKEN}/ca.crt",
    }


def _mounts(model: CachedModel) -> list[dict[str, Any]]:
    mounts = [
        mount("policy", paths.POLICY),
        mount("link", paths.LINK, read_only=True),
        mount("engine-socket", paths.ENGINE),
        mount("gate-tls", paths.GATE_TLS, read_only=True),
        mount("ack-token", paths.ACK_TOKEN, read_only=True),
        mount("kube-token", paths.KUBE_TOKEN, read_only=True),
        mount("gate-tmp", paths.TEMPORARY),
    ]
    if model.spec.gate.tls.mode is TlsMode.SECRET:
        mounts.append(mount("caller-tls", paths.CALLER_TLS, read_only=True))
    return mounts

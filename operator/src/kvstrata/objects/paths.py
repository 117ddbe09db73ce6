"""Ports, mount points and files that the containers of a pod share."""

from __future__ import annotations

HTTPS_PORT = 8443
HTTP_PORT = 8080
HEALTH_PORT = 8081
CACHE_PORT = 5555
CACHE_HTTP_PORT = 5556
"""LMCache's HTTP server, on loopback; 8080 is the gate's when TLS is disabled."""

REDIS_PORT = 6379
REDIS_BUS_PORT = 16379
"""Cluster bus: always the server's port plus 10000."""

PLUGIN = "/kvstrata/plugin"
PLUGIN_SOURCE = "/opt/kvstrata/plugin"
POLICY = "/run/kvstrata/policy"
LINK = "/run/kvstrata/link"
ENGINE = "/run/kvstrata/engine"
ENGINE_SOCKET = "/run/kvstrata/engine/engine.sock"
GATE_TLS = "/run/kvstrata/tls"
CALLER_TLS = "/run/kvstrata/caller-tls"
ACK_TOKEN = "/run/kvstrata/ack-token"  # noqa: S105  (a path)
KUBE_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105  (a path)
NVME = "/run/kvstrata/nvme"
HUB_TOKEN = "/run/kvstrata/hub"  # noqa: S105  (a path)
HUB_AUTHORITY = "/run/kvstrata/hub-authority"
HUB_CACHE = "/run/kvstrata/weights-cache"
WEIGHTS = "/run/kvstrata/weights"
SHARED_MEMORY = "/dev/shm"  # noqa: S108  (the container's own)
TEMPORARY = "/tmp"  # noqa: S108  (a volume of each container's own)

DELETION = "/run/kvstrata/deletion"
"""A deletion Job's order, and the files that it names."""

REDIS_TLS = "/etc/kvstrata/tls"
REDIS_AUTH = "/etc/kvstrata/auth"


def nvme_directory(tier: str) -> str:
    return f"{NVME}/{tier}"

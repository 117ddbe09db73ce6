"""The Kubernetes resources that the operator reads or writes, and their paths."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.api import KINDS
from kvstrata.model.refs import GROUP_VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of the collection (of all namespaces when None), an object or its subresource."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        place = ("namespaces", namespace) if namespace is not None else ()
        return "/".join([root, *place, self.plural, *(part for part in (name, subresource) if part)])


OWN_RESOURCES = tuple(Resource(GROUP_VERSION, kind.INFO.kind, kind.INFO.plural) for kind in KINDS)

DEPLOYMENT = Resource("apps/v1", "Deployment", "deployments")
NETWORK_POLICY = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")

CHILD_RESOURCES = (
    DEPLOYMENT,
    Resource("apps/v1", "StatefulSet", "statefulsets"),
    Resource("v1", "Service", "services"),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    NETWORK_POLICY,
    Resource("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
)
"""Built by the operator, and watched so that manual changes are undone."""

POD = Resource("v1", "Pod", "pods")
SECRET = Resource("v1", "Secret", "secrets")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
LEASE = Resource("coordination.k8s.io/v1", "Lease", "leases")
JOB = Resource("batch/v1", "Job", "jobs")
EVENT = Resource("v1", "Event", "events")
NAMESPACE = Resource("v1", "Namespace", "namespaces")
ENDPOINT_SLICE = Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
NODE = Resource("v1", "Node", "nodes")
TOKEN_REVIEW = Resource("authentication.k8s.io/v1", "TokenReview", "tokenreviews")
SERVICE_MONITOR = Resource("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors")


def child_resources(service_monitors: bool) -> tuple[Resource, ...]:
    return (*CHILD_RESOURCES, POD, *((SERVICE_MONITOR,) if service_monitors else ()))


BY_KIND = {
    resource.kind: resource
    for resource in (*OWN_RESOURCES, *CHILD_RESOURCES, POD, SECRET, LEASE, EVENT, SERVICE_MONITOR)
}

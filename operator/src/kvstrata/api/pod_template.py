"""Settings of pods and containers that users may choose."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kvstrata.api.base import ApiModel, Rule, exactly_one_of
from kvstrata.api.common import AnyObject, ConfigMapKeyRef, Labels, LocalObjectRef, SecretKeyRef
from kvstrata.api.markers import atomic_list, map_list
from kvstrata.api.scalars import AnnotationValue, ForeignName, LabelKey, LabelValue, Pattern, ResourceQuantity

_OF_THE_ENGINE = "^(VLLM|LMCACHE|TORCH)"


FieldPath = Annotated[
    str,
    StringConstraints(max_length=400),
    Pattern(
        r"^(metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])|spec\.nodeName|status\.(host|pod)IPs?)$",
        "must be a field of the pod such as metadata.name, metadata.labels['team'], spec.nodeName or status.podIP",
    ),
]


class FieldRef(ApiModel):
    """A field of the pod."""

    field_path: FieldPath
    """Path of the field."""


class EnvSource(ApiModel):
    """Source of a variable's value."""

    secret_key_ref: SecretKeyRef | None = None
    """A key of a Secret, except the operator's own."""

    config_map_key_ref: ConfigMapKeyRef | None = None
    """A key of a ConfigMap."""

    field_ref: FieldRef | None = None
    """A field of the pod."""

    RULES = (
        exactly_one_of(
            ("secretKeyRef", "configMapKeyRef", "fieldRef"),
            "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )


class EnvVar(ApiModel):
    """One environment variable with a plain value, or with one from elsewhere."""

    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=128),
        Pattern(r"^[A-Za-z_][A-Za-z0-9_]*$", "must be letters, digits and underscores, and begin with no digit"),
    ]
    """Name of the variable."""

    value: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Value of the variable."""

    value_from: EnvSource | None = None
    """Source of the value, in place of value. It is part of the cache identity, the value is not: so variables of the
    engine that change blocks (VLLM_, LMCACHE_, TORCH) have a plain value."""

    RULES = (
        Rule(
            cel="!has(self.valueFrom) || !has(self.value)",
            message="set value or valueFrom, not both",
            field_path=".valueFrom",
            holds=lambda one: one.value_from is None or "value" not in one.model_fields_set,
        ),
        Rule(
            cel=f"!has(self.valueFrom) || !self.name.matches('{_OF_THE_ENGINE}')",
            message="the value of this variable is part of the cache identity: set value",
            field_path=".valueFrom",
            holds=lambda one: one.value_from is None or not re.search(_OF_THE_ENGINE, one.name),
        ),
    )


ResourceName = Annotated[str, StringConstraints(min_length=1, max_length=253)]
ResourceAmounts = Annotated[dict[ResourceName, ResourceQuantity], Field(max_length=16)]


class ResourceRequirements(ApiModel):
    """Compute resources of a container."""

    requests: ResourceAmounts = Field(default_factory=dict)
    """Amounts that the scheduler reserves for the container."""

    limits: ResourceAmounts = Field(default_factory=dict)
    """Largest amounts that the container may use."""


class Toleration(ApiModel):
    """Lets pods run on nodes with a matching taint."""

    key: Annotated[str, StringConstraints(max_length=317)] | None = None
    """Key of the taint; absent matches every key."""

    operator: Literal["Exists", "Equal"] | None = None
    """Absent means Equal."""

    value: LabelValue | None = None
    """Value of the taint."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; absent matches every effect."""

    toleration_seconds: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """How long a NoExecute taint is tolerated; absent means forever."""


class PodTemplate(ApiModel):
    """Settings of pods that users may choose; all others belong to the operator."""

    labels: Labels = Field(default_factory=dict)
    """Labels besides those of the operator. The prefixes app.kubernetes.io/ and kvstrata.io/ are the operator's."""

    annotations: Annotated[dict[LabelKey, AnnotationValue], Field(max_length=32)] = Field(default_factory=dict)
    """Annotations besides those of the operator."""

    node_selector: Labels = Field(default_factory=dict)
    """Labels that a node must have."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32), atomic_list()] = ()
    """Taints that are tolerated."""

    affinity: AnyObject | None = None
    """Affinity of the pods, as in a Pod."""

    topology_spread_constraints: Annotated[tuple[AnyObject, ...], Field(max_length=8), atomic_list()] = ()
    """How the pods spread over the cluster, as in a Pod."""

    priority_class_name: ForeignName | None = None
    """PriorityClass of the pods."""

    runtime_class_name: ForeignName | None = None
    """RuntimeClass of the pods."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When images are pulled; absent leaves the choice to Kubernetes."""

    image_pull_secrets: Annotated[tuple[LocalObjectRef, ...], Field(max_length=8), map_list()] = ()
    """Secrets with credentials of registries."""

    scheduler_name: ForeignName | None = None
    """Scheduler of the pods."""

    dns_policy: Literal["ClusterFirst", "Default", "None"] | None = None
    """Source of the resolver's configuration; absent means ClusterFirst."""

    dns_config: AnyObject | None = None
    """Settings of the resolver, as in a Pod."""

    host_aliases: Annotated[tuple[AnyObject, ...], Field(max_length=32), atomic_list()] = ()
    """Entries of the pods' hosts file, as in a Pod."""

    RULES = (
        Rule(
            cel="!has(self.labels) || "
            "!self.labels.exists(key, key.startsWith('app.kubernetes.io/') || key.startsWith('kvstrata.io/'))",
            message="labels with the prefixes app.kubernetes.io/ and kvstrata.io/ belong to the operator",
            field_path=".labels",
            holds=lambda pod: not any(key.startswith(("app.kubernetes.io/", "kvstrata.io/")) for key in pod.labels),
        ),
    )


class ServerPodTemplate(PodTemplate):
    """Settings of the pods of managed servers. Pods of a model keep a ServiceAccount of their own: it may read their
    policies, and the operator believes its tokens only."""

    service_account_name: ForeignName | None = None
    """ServiceAccount of the pods; its token is not mounted. Absent means the namespace's default."""

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


class EnvSource(ApiModel):
    """Source of a variable's value."""

    secret_key_ref: SecretKeyRef | None = None
    """A key of a Secret, except the operator's own."""

    config_map_key_ref: ConfigMapKeyRef | None = None
    """A key of a ConfigMap."""

    field_ref: AnyObject | None = None
    """A field of the pod, as in a Pod."""

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
    """Source of the value, in place of value. The cache identity has the source, not the value: so variables of the
    engine that may change blocks (VLLM, LMCACHE, TORCH) need a plain value."""

    RULES = (
        Rule(
            cel=f"!has(self.valueFrom) || !(has(self.value) || self.name.matches('{_OF_THE_ENGINE}'))",
            message="valueFrom replaces value; variables that may change blocks (VLLM, LMCACHE, TORCH) need value",
            field_path=".valueFrom",
            holds=lambda one: (
                one.value_from is None or not ("value" in one.model_fields_set or re.search(_OF_THE_ENGINE, one.name))
            ),
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
    """Labels of the pods and of the objects made with them. The prefixes app.kubernetes.io/ and kvstrata.io/ are the
    operator's."""

    annotations: Annotated[dict[LabelKey, AnnotationValue], Field(max_length=32)] = Field(default_factory=dict)
    """Annotations of the pods and of the objects made with them, such as an identity of their ServiceAccount."""

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

    RULES = (
        Rule(
            cel="!has(self.labels) || "
            "!self.labels.exists(key, key.startsWith('app.kubernetes.io/') || key.startsWith('kvstrata.io/'))",
            message="labels with the prefixes app.kubernetes.io/ and kvstrata.io/ belong to the operator",
            field_path=".labels",
            holds=lambda pod: not any(key.startswith(("app.kubernetes.io/", "kvstrata.io/")) for key in pod.labels),
        ),
    )

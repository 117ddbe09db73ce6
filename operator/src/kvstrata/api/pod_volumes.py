"""Volumes of users in the engine's container."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import ConfigDict, StringConstraints

from kvstrata.api.base import ApiModel, Rule, exactly_one_of
from kvstrata.api.common import AnyObject, SecretRef, not_owned
from kvstrata.api.scalars import AbsolutePath, ForeignName, ObjectName, cel_text

_OWN_PLACES = r"^/((run|var|var/run|tmp)/?)?$|^/(((var/)?run/)?kvstrata|dev|proc|sys)(/|$)|(^|/)\.\.?(/|$)|//"
"""Mount paths over or inside the directories of the operator and the kernel, and paths with detours to them."""


class SecretVolume(ApiModel):
    """Files of a Secret, except the operator's own."""

    secret_name: ForeignName
    """Name of the Secret."""

    RULES = (not_owned("secretName"),)


class CsiVolume(ApiModel):
    """An inline volume of a CSI driver, as in a Pod."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})

    node_publish_secret_ref: SecretRef | None = None
    """Secret for the driver."""


SOURCES = ("configMap", "secret", "persistentVolumeClaim", "emptyDir", "ephemeral", "csi")


class EngineVolume(ApiModel):
    """A volume of the pod that the engine alone can mount. Sources are those of the restricted Pod Security Standard
    without projected, which could hold a token of the gate's ServiceAccount."""

    name: ObjectName
    """Name for volumeMounts; the pod's volume is user-NAME."""

    config_map: AnyObject | None = None
    """Files of a ConfigMap, as in a Pod."""

    secret: SecretVolume | None = None
    """Files of a Secret."""

    persistent_volume_claim: AnyObject | None = None
    """An existing claim, as in a Pod."""

    empty_dir: AnyObject | None = None
    """Space of the node, as in a Pod."""

    ephemeral: AnyObject | None = None
    """A claim for each pod, as in a Pod."""

    csi: CsiVolume | None = None
    """An inline volume of a CSI driver, as in a Pod."""

    RULES = (exactly_one_of(SOURCES, f"a volume needs exactly one of {', '.join(SOURCES)}; others are refused"),)


class EngineMount(ApiModel):
    """Place of a volume in the engine's container."""

    name: ObjectName
    """Name of the volume in volumes."""

    mount_path: AbsolutePath
    """Absolute path; not over or inside /kvstrata, /run/kvstrata, /dev, /proc, /sys, and not /, /run, /var or /tmp."""

    sub_path: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Path within the volume. Absent means its root."""

    read_only: bool = False
    """Whether the engine may only read. Absent means false."""

    RULES = (
        Rule(
            cel=f"!self.mountPath.matches({cel_text(_OWN_PLACES)})",
            message="this place belongs to the operator or the system: mount the volume elsewhere",
            field_path=".mountPath",
            holds=lambda mounted: not re.search(_OWN_PLACES, mounted.mount_path),
        ),
    )

"""Volumes of users in the engine's container."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import ApiModel, Rule, exactly_one_of
from kvstrata.api.common import OWNED_SECRETS, AnyObject
from kvstrata.api.markers import atomic_list
from kvstrata.api.scalars import ForeignName, Pattern, cel_text

_OWN_PLACES = (
    r"^/(run|var|var/run|kvstrata|dev|proc|sys|tmp)?/?$|^/((var/)?run/kvstrata|kvstrata|dev|proc|sys)/|"
    r"^/(var/)?run/kvstrata$|(^|/)\.\.?(/|$)|//"
)
"""Mount paths over or inside the directories of the operator and the kernel, and paths with detours to them."""

VolumeName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=40),
    Pattern(
        r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
        "must be lower-case letters, digits and hyphens, with a letter or digit at both ends",
    ),
]


class SecretVolume(ApiModel):
    """Files of a Secret, except the operator's own."""

    secret_name: ForeignName
    """Name of the Secret."""

    items: Annotated[tuple[AnyObject, ...], Field(max_length=64), atomic_list()] = ()
    """Keys and their files, as in a Pod. Absent means all keys."""

    optional: bool = False
    """Whether pods start without the Secret. Absent means false."""

    RULES = (
        Rule(
            cel=" && ".join(f"!self.secretName.startsWith('{prefix}')" for prefix in OWNED_SECRETS),
            message=f"Secrets whose names begin with {' or '.join(OWNED_SECRETS)} belong to the operator: name another "
            "Secret",
            field_path=".secretName",
            holds=lambda volume: not volume.secret_name.startswith(OWNED_SECRETS),
        ),
    )


SOURCES = ("configMap", "secret", "persistentVolumeClaim", "emptyDir", "ephemeral", "csi")


class EngineVolume(ApiModel):
    """A volume of the pod that the engine alone can mount. Sources are those of the restricted Pod Security Standard
    without projected, which could hold a token of the gate's ServiceAccount."""

    name: VolumeName
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

    csi: AnyObject | None = None
    """An inline volume of a CSI driver, as in a Pod."""

    RULES = (exactly_one_of(SOURCES, f"a volume needs exactly one of {', '.join(SOURCES)}; others are refused"),)


class EngineMount(ApiModel):
    """Place of a volume in the engine's container."""

    name: VolumeName
    """Name of the volume in volumes."""

    mount_path: Annotated[
        str, StringConstraints(max_length=256), Pattern(r"^/[^:\p{C}]*$", "must be an absolute path without colons")
    ]
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

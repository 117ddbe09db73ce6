"""Source of the served model's weights, and their form."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import ApiModel, exactly_one_of
from kvstrata.api.common import ConfigMapKeyRef, SecretKeyRef
from kvstrata.api.markers import at_least
from kvstrata.api.scalars import AbsolutePath, ForeignName, ModelName, Pattern, Quantity


class HubSource(ApiModel):
    """Weights from the Hugging Face hub."""

    repository: ModelName
    """Repository, for example Qwen/Qwen3-8B."""

    token_secret_ref: SecretKeyRef | None = None
    """Token for repositories that are not public."""

    authority_config_map_ref: ConfigMapKeyRef | None = None
    """Certificate authorities in PEM that the engine trusts, in place of its image's: for a mirror (HF_ENDPOINT in
    engine.env) or a proxy with a certificate of its own."""

    cache_size: Annotated[Quantity, at_least("1Mi", "must be at least 1Mi")] | None = None
    """Size limit of the volume for the weights. Absent means none."""


class PvcSource(ApiModel):
    """Weights on a volume."""

    claim_name: ForeignName
    """PersistentVolumeClaim; it is mounted read-only."""

    path: AbsolutePath | None = None
    """Folder of the weights within the volume. Absent means its root."""


class WeightsSource(ApiModel):
    """Where weights come from."""

    hub: HubSource | None = None
    """The Hugging Face hub."""

    pvc: PvcSource | None = None
    """A volume."""

    path: AbsolutePath | None = None
    """A folder of the engine's image."""

    RULES = (exactly_one_of(("hub", "pvc", "path"), "source needs exactly one of hub, pvc and path"),)


RevisionText = Annotated[
    str,
    StringConstraints(min_length=1, max_length=128),
    Pattern(r"^[A-Za-z0-9][-A-Za-z0-9._/]*$", "must be a branch, tag or commit such as main"),
]


class DType(StrEnum):
    """Type of weights and activations."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class ModelSpec(ApiModel):
    """The model that is served."""

    name: ModelName
    """Name under which the gate serves the model, and which callers send as model."""

    source: WeightsSource
    """Where the weights come from."""

    revision: RevisionText | None = None
    """Branch, tag or commit of a hub repository; otherwise any text that changes when the weights do. It is part of the
    cache identity."""

    tokenizer: (
        Annotated[
            str,
            StringConstraints(min_length=1, max_length=1024),
            Pattern(r"^[^\p{C}]+$", "must be printable characters"),
        ]
        | None
    ) = None
    """Repository or path of the tokenizer. Absent means that of the model."""

    dtype: DType = DType.AUTO
    """Type of weights and activations. Absent means auto."""

    max_model_len: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Longest context in tokens. Absent leaves the choice to the engine."""

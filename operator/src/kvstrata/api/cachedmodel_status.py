"""Status of a CachedModel: defaults in force, pods, isolation probes with their spec, caches of former identities."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kvstrata.api.base import ApiModel, StatusModel
from kvstrata.api.markers import atomic_list, between, map_list
from kvstrata.api.scalars import Count, Duration, ForeignName, Generation, Image, ObjectName, ShortText, Timestamp
from kvstrata.api.status import CoverageStatus, Hex, PodCount, ResolvedIdentity, Revision
from kvstrata.contract import Meaningful


class ProbeMode(StrEnum):
    """Whether pods are probed."""

    SCHEDULED = "Scheduled"
    NEVER = "Never"


class OnProbeFailure(StrEnum):
    """Reaction to a probe that finds isolation broken."""

    REPORT = "Report"
    FENCE_REUSE = "FenceReuse"


class ProbeSpec(ApiModel):
    """Probes that test on running pods whether scopes are isolated."""

    mode: ProbeMode = ProbeMode.SCHEDULED
    """Scheduled: on schedule, and soon after keyspaces changed. Never: pods are not probed, and their isolation is not
    verified. Absent means Scheduled. For each probe the engine computes four prompts of one chunk."""

    interval: Annotated[Duration, between("10s", "168h")] = Duration("5m")
    """Time between two probes of a pod. Absent means 5m."""

    on_failure: OnProbeFailure = OnProbeFailure.REPORT
    """Reaction when one scope finds blocks that another one stored. Report: condition, event and metric. FenceReuse: in
    addition no reuse for this model, as with reuse.mode Disabled, until cacheGeneration is raised. Absent means
    Report."""


MAX_WITNESSES = 1000
"""Most pods that status.witnesses names."""


class WitnessPod(StatusModel):
    """A pod whose acknowledgement an invalidation needs."""

    name: ShortText
    """Its name."""

    uid: ShortText
    """Its uid."""

    acked: Revision | None = None
    """Last bundle revision that it is known to have acknowledged. The rules of that revision decide when the pod fences
    itself."""

    node: ShortText = ""
    """Its node, by which a later operator learns that it ended."""


class EffectiveModel(StatusModel):
    """Values in force of fields that the spec may leave out."""

    tiers: Annotated[tuple[ObjectName, ...], Field(max_length=16), atomic_list()] = ()
    """CacheTiers from fast to slow."""

    api_keys_secret: ForeignName | None = None
    """Secret with the hashes of the callers' API keys."""

    chunk_size: Count | None = None
    """Tokens per chunk: shorter prompts are never reused."""

    cache_image: Image | None = None
    """Image of the cache container."""


class ProbeFailure(StatusModel):
    """A probe that found isolation broken."""

    time: Timestamp
    """When the probe found it."""

    reason: ShortText
    """The reason that condition IsolationVerified has for it."""

    message: Annotated[str, StringConstraints(max_length=1024)]
    """The pod and tiers, the scope that stored the blocks, and the scope that found them."""

    cache_generation: Generation
    """The cacheGeneration in which it was found. The failure stands until a higher one is declared."""


class ProbeStatus(StatusModel):
    """Results of isolation probes; updated once per interval."""

    time: Timestamp | None = None
    """When the least recently probed pod answered."""

    revision: Revision | None = None
    """The oldest bundle revision under which a pod was probed."""

    pods: PodCount | None = None
    """Pods that were probed."""

    lookups: Count | None = None
    """Lookups that had to miss and did, in the last probe of each pod."""

    controls: Count | None = None
    """Lookups that had to hit and did, in the last probe of each pod."""

    failure: ProbeFailure | None = None
    """The last failure."""


MAX_FINGERPRINTS = 16
"""Most fingerprints in status."""


class IdentityFact(StatusModel):
    """An input of a fingerprint."""

    name: ShortText
    """Its name, such as files, commit, vllm or attentionBackend."""

    value: ShortText
    """Its value; of files a digest."""


class ResolvedFingerprint(StatusModel):
    """A fingerprint of engines and their models' files, and the pods that have it."""

    fingerprint: Hex
    """The fingerprint. Pods share blocks if both identity and fingerprint are the same."""

    identity: Hex
    """The declared cache identity of these pods."""

    pods: PodCount
    """Serving pods that have it; 0 for one that is kept here until every serving pod has reported its own."""

    facts: Annotated[tuple[IdentityFact, ...], Field(max_length=32), atomic_list()] = ()
    """The inputs of the fingerprint."""


MAX_FORMER_IDENTITIES = 32
"""Most former identities in status. Blocks of further ones expire by age."""


class FormerPhase(Meaningful):
    """State of the blocks of a former identity."""

    IN_USE = "InUse", "A pod of this model still has the identity, or another model has it."
    KEPT = "Kept", "A rollback reuses them, until rollbackWindow is over."
    RECLAIMING = "Reclaiming", "They are being deleted from Redis tiers."


class FormerIdentity(StatusModel):
    """A former cache identity of the model, whose blocks may still be in Redis tiers."""

    identity: ResolvedIdentity
    """The declared identity, for all of its blocks; or the present one, a dot, and a fingerprint that no pod has any
    more."""

    phase: FormerPhase
    """InUse: a pod of this model or another model has the identity. Kept: for a rollback, until rollbackWindow is over.
    Reclaiming: its blocks are being deleted."""

    message: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """The end of the retention, the user of the identity, or the progress of the deletion."""

    unused_since: Timestamp | None = None
    """Since when no pod of the model has it, every serving pod has reported its fingerprint, and the rollout is
    complete; rollbackWindow counts from here."""

    round: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of the current deletion attempt; absent for the first."""

    blocks: Count | None = None
    """Blocks deleted by attempts that did not finish, as far as they reported them."""

    bytes: Count | None = None
    """Bytes of these blocks."""


class ReclaimedCache(StatusModel):
    """A completed deletion of a former identity's blocks."""

    identity: ResolvedIdentity
    """The identity, as in formerIdentities."""

    time: Timestamp
    """When the deletion was complete."""

    blocks: Count
    """Blocks deleted from all Redis tiers of the namespace, as far as deletions reported them."""

    bytes: Count
    """Bytes of these blocks."""


class CachedModelStatus(CoverageStatus):
    """Observed state of a CachedModel."""

    effective: EffectiveModel | None = None
    """Values in force of fields that the spec may leave out."""

    identity: Hex | None = None
    """Declared cache identity: hash of everything in the spec that changes KV bytes."""

    fingerprints: Annotated[tuple[ResolvedFingerprint, ...], Field(max_length=MAX_FINGERPRINTS), atomic_list()] = ()
    """Fingerprints of the engines of serving pods, those of most pods first; at most 16 of them. One that no pod has
    any more moves to formerIdentities."""

    former_identities: Annotated[
        tuple[FormerIdentity, ...], Field(max_length=MAX_FORMER_IDENTITIES), map_list("identity")
    ] = ()
    """Former identities whose blocks are not deleted from Redis tiers yet; at most 32 of them."""

    reclaimed: ReclaimedCache | None = None
    """The last completed deletion of a former identity's blocks."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""

    replicas: PodCount | None = None
    """Pods that exist; read by autoscalers."""

    ready_replicas: PodCount | None = None
    """Pods that are ready."""

    selector: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Label selector of the pods; read by autoscalers."""

    bundle_revision: Revision | None = None
    """Newest revision of the model's bundle: the compiled policies that its pods read."""

    witnesses: Annotated[tuple[WitnessPod, ...], Field(max_length=MAX_WITNESSES), atomic_list()] = ()
    """Pods that may hold a policy, at most 1000 of them. An operator that starts compares them with the pods that
    exist, to find those that vanished."""

    probe: ProbeStatus | None = None
    """Results of isolation probes."""

    endpoint: ShortText | None = None
    """URL of the model's Service."""

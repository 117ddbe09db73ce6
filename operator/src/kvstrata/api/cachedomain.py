"""CacheDomain: the settings and the state of one namespace that belong to no other object."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from kvstrata.api.base import ENFORCED, READY, ApiModel, Column, KindInfo, Resource, Rule, StatusModel
from kvstrata.api.common import Budgets, ConfigMapKeyRef
from kvstrata.api.markers import atomic_list, between
from kvstrata.api.scalars import Count, Duration, ObjectName, Pattern, ShortText, Timestamp
from kvstrata.api.status import CoverageStatus, Hex, Revision, ScopedStatus, ScopeStatus
from kvstrata.contract.receipt.vocabulary import KeyCustody

DOMAIN_NAME = "default"
"""The only name that a CacheDomain may have."""


class OnStale(StrEnum):
    """Behaviour of pods that cannot confirm that their policy is current."""

    FENCE = "Fence"
    SERVE_STALE = "ServeStale"


ServiceAddress = Annotated[
    str,
    StringConstraints(max_length=261),
    Pattern(
        r"^https://([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$",
        "must be https://HOST or https://HOST:PORT, without a path",
    ),
]
ServicePath = Annotated[
    str,
    StringConstraints(min_length=1, max_length=128),
    Pattern(
        r"^[A-Za-z0-9_][-A-Za-z0-9_.]*(/[A-Za-z0-9_][-A-Za-z0-9_.]*)*$",
        "must be a path such as transit or team/keys: no part is empty or begins with a dot",
    ),
]
"""Path at a service. No part of it leads upwards."""

DEFAULT_AUTH_MOUNT = "kubernetes"


class KeyManagement(ApiModel):
    """A key management service: OpenBao or Vault with the Transit engine and the authentication method `kubernetes`."""

    address: ServiceAddress
    """https://HOST:PORT. The administrator of the operator must list it in the chart's kms.addresses, with authMount
    and namespace."""

    authority_config_map_ref: ConfigMapKeyRef | None = None
    """Certificate authority in PEM; the service's certificate must be signed by it. Read only if the entry in the
    chart's kms.addresses has authority: FromNamespace; otherwise the entry has the authority."""

    role: Annotated[
        str,
        StringConstraints(min_length=1, max_length=128),
        Pattern(r"^[-A-Za-z0-9_.]+$", "must be letters, digits, hyphens, underscores and dots"),
    ]
    """Name of the operator's role at the authentication method."""

    mount: ServicePath = "transit"
    """Path of the Transit engine. Absent means transit."""

    auth_mount: ServicePath = DEFAULT_AUTH_MOUNT
    """Path of the authentication method. Absent means kubernetes."""

    namespace: ServicePath | None = None
    """Namespace within the service. Absent means its root."""


class UnknownTenants(StrEnum):
    """What happens to authenticated callers without a TenantCachePolicy."""

    NO_REUSE = "NoReuse"
    REFUSE = "Refuse"


class AuditNames(StrEnum):
    """Naming of tenants in the audit log."""

    SCOPES = "Scopes"
    TENANTS = "Tenants"


class CacheDomainSpec(ApiModel):
    """Settings of the whole namespace. Every field may be absent."""

    stale_after: Annotated[Duration, between("5s", "24h")] = Duration("5m")
    """Age of a pod's last confirmation of its policy at which onStale applies. Absent means 5m. An unreachable pod
    delays an invalidation by at most staleAfter, and an erasure by maxRequestDuration more."""

    drain_timeout: Annotated[Duration, between("1s", "1h")] = Duration("30s")
    """How long requests on a removed keyspace may continue before they are aborted. Absent means 30s."""

    max_request_duration: Annotated[Duration, between("1s", "24h")] = Duration("15m")
    """How long requests may continue on a pod that has not confirmed its policy for staleAfter, as while the API server
    is away, before they are aborted. New requests are answered without reuse. Absent means 15m."""

    deletion_deadline: Annotated[Duration, between("1m", "720h")] = Duration("24h")
    """Time after which a lazy invalidation without a deadline, and an erasure whose policy or CacheInvalidation was
    deleted, ends although it is not proven. Status, Event and receipt name the rest, as `NotProven`. A policy still
    waits until no bundle has its epoch. Absent means 24h."""

    on_stale: OnStale = OnStale.FENCE
    """Fence: requests are answered without any reuse. ServeStale: the last known policy stays in use, and invalidations
    give no guarantee for unreachable pods. Absent means Fence."""

    key_custody: KeyCustody = KeyCustody.SECRET
    """Where data keys are kept. Secret: in Secrets of the namespace. KMS: wrapped by a key management service, which
    can destroy them. It cannot be changed while keys exist. Absent means Secret."""

    kms: KeyManagement | None = None
    """The key management service, for keyCustody: KMS. Keep it until the last key that it wraps is destroyed: without
    it, keys can be neither unwrapped nor destroyed."""

    public_budgets: Budgets = ()
    """Budgets of the Public scope; a tier without an entry is used without guarantee and without limit."""

    unknown_tenants: UnknownTenants = UnknownTenants.NO_REUSE
    """NoReuse: requests of callers without a policy are answered, without reuse and without stores. Refuse: they get
    403. Absent means NoReuse."""

    audit_names: AuditNames = AuditNames.SCOPES
    """Naming of tenants in the audit log of operator and gates. Scopes: objects and the first digits of keyspaces.
    Tenants: tenant names in addition. Absent means Scopes."""

    RULES = (
        Rule(
            cel="!has(self.keyCustody) || self.keyCustody != 'KMS' || has(self.kms)",
            message="kms is required for keyCustody: KMS",
            field_path=".kms",
            holds=lambda spec: spec.key_custody is not KeyCustody.KMS or spec.kms is not None,
        ),
    )


DomainId = Annotated[
    str, StringConstraints(max_length=32), Pattern(r"^[0-9a-f]+$", "must be hexadecimal digits in lower case")
]


class ReceiptChain(StatusModel):
    """The domain's chain of erasure receipts."""

    count: Count = 0
    """How many receipts were issued."""

    head: Hex | None = None
    """Digest of the newest receipt."""


class RestoreWitness(StatusModel):
    """A pod that held a newer bundle than the API server."""

    pod: ShortText
    """Its name."""

    uid: ShortText
    """Its uid."""

    model: ObjectName
    """Its CachedModel."""

    revision: Revision
    """Bundle revision that it held."""

    known: Revision
    """Bundle revision that the API server had."""

    at: Timestamp
    """When the operator accepted its report. It accepts no other report of this pod within an hour."""


class Restored(StatusModel):
    """The last detected restore of the API server to an older state."""

    id: Hex
    """Random id of the restore; the Secret with the domain's key bears it once the key was replaced."""

    detected_at: Timestamp
    """When the operator detected it."""

    settled_at: Timestamp | None = None
    """When every serving pod had acknowledged bundles under the new key."""

    revision: Revision
    """Every bundle has a revision above this one, which is above any that a pod can hold."""

    term: Revision
    """Every bundle has at least this leader term."""

    witnesses: Annotated[tuple[RestoreWitness, ...], Field(max_length=16), atomic_list()] = ()
    """Pods that reported it, and pods that reported restores within the hour before it."""


class Installation(StatusModel):
    """An installation of the operator."""

    uid: ShortText
    """Its id, which outlives pods, upgrades, and a release that is renamed or installed again in its namespace."""

    namespace: ObjectName
    """Namespace of its operator."""

    release: ShortText = ""
    """Its Helm release."""


class CacheDomainStatus(CoverageStatus, ScopedStatus):
    """Observed state of a CacheDomain."""

    domain_id: DomainId | None = Field(default=None, alias="domainID")
    """Random id of the domain, part of every key in shared tiers."""

    served_by: Installation | None = None
    """The installation that claims the namespace; no other one writes in it. The claim ends when its release is
    uninstalled, or when the annotation `kvstrata.io/served-by` has the uid of another."""

    scope: ScopeStatus | None = None
    """The Public scope and its epoch."""

    bundle_revision: Revision | None = None
    """Highest revision of any bundle (compiled policies of one model) of this domain."""

    receipts: ReceiptChain | None = None
    """The chain of erasure receipts."""

    key_custody: KeyCustody | None = None
    """Custody of the existing data keys, and of new ones. Absent means Secret."""

    restored: Restored | None = None
    """The last detected restore of the API server from a backup; absent if there was none."""


class CacheDomain(Resource):
    """A CacheDomain holds the settings and the state of a whole namespace: the tolerated age of policies, the custody
    of data keys, the treatment of tenants without a policy, and the domain's identity. Each namespace has one, named
    default; the operator creates it when it is missing."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="CacheDomain",
        plural="cachedomains",
        short_names=("cdom",),
        columns=(
            ENFORCED,
            *READY,
            Column("Revision", ".status.bundleRevision", "integer", "Highest bundle revision", priority=1),
            Column.of_condition("Admitted", "Admitted", priority=1),
            Column("Domain", ".status.domainID", description="Random id of the domain", priority=1),
        ),
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        *Resource.RULES,
        Rule(
            cel="self.metadata.name == 'default'",
            message="a namespace has one CacheDomain, and its name must be default",
            field_path=".metadata.name",
            holds=lambda domain: domain.metadata.name == DOMAIN_NAME,
        ),
    )

    spec: CacheDomainSpec = CacheDomainSpec()
    status: CacheDomainStatus = CacheDomainStatus()

"""PrefixPool: prefixes that are computed once and read by many tenants."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from kvstrata.api.base import (
    AGE,
    READY,
    ApiModel,
    Column,
    KindInfo,
    Resource,
    Rule,
    StatusModel,
    condition_column,
    exactly_one_of,
)
from kvstrata.api.common import (
    Admission,
    AnyObject,
    ConfigMapKeyRef,
    Count,
    Duration,
    Hex,
    ObjectRef,
    ScopeStatus,
    Status,
    TierNames,
    Usage,
)
from kvstrata.api.markers import AtomicList, Between, Immutable, MapList, SetList
from kvstrata.api.scalars import Generation, ObjectName, Quantity, ShortText, TenantName, Timestamp

PrefixText = Annotated[str, StringConstraints(min_length=1, max_length=262_144)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=131_072), AtomicList()]


class Message(ApiModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    """Role of the author."""

    content: PrefixText
    """Text of the message."""


Messages = Annotated[tuple[Message, ...], Field(min_length=1, max_length=64), AtomicList()]


class SourceFormat(StrEnum):
    """Content of a ConfigMap's key."""

    TEXT = "Text"
    CHAT = "Chat"


class Prefix(ApiModel):
    """One prefix, given in exactly one form."""

    name: ObjectName
    """Name of the prefix within its pool."""

    text: PrefixText | None = None
    """Text, tokenised without a chat template."""

    messages: Messages | None = None
    """Messages, rendered by the model's chat template."""

    tools: Annotated[tuple[AnyObject, ...], Field(max_length=128), AtomicList()] = ()
    """Tools that the chat template renders; with messages only. The API server stores the keys of these objects in
    alphabetical order, and most templates render keys in the order of the object. Callers must therefore send the same
    order; or use a ConfigMap with format Chat, whose text keeps its order."""

    chat_template_kwargs: AnyObject | None = None
    """Further arguments of the chat template; with messages only. Only simple values are accepted, as from callers."""

    token_ids: TokenIds | None = Field(default=None, alias="tokenIDs")
    """Token ids."""

    config_map_key_ref: ConfigMapKeyRef | None = None
    """Key of a ConfigMap that holds the prefix. A change is read within a minute."""

    format: SourceFormat | None = None
    """Form of the ConfigMap's key, with configMapKeyRef only. Text: text, tokenised without a chat template. Chat: a
    JSON object with messages and optionally tools and chat_template_kwargs, as callers send them to
    /v1/chat/completions. Absent means Text."""

    @property
    def effective_format(self) -> SourceFormat:
        """format, or its default."""
        return self.format or SourceFormat.TEXT

    RULES = (
        exactly_one_of(
            ("text", "messages", "tokenIDs", "configMapKeyRef"),
            "a prefix needs exactly one of text, messages, tokenIDs and configMapKeyRef",
        ),
        Rule(
            cel="has(self.messages) || (!has(self.tools) && !has(self.chatTemplateKwargs))",
            message="tools and chatTemplateKwargs are only for a prefix with messages",
            holds=lambda prefix: (
                prefix.messages is not None or (not prefix.tools and prefix.chat_template_kwargs is None)
            ),
        ),
        Rule(
            cel="has(self.configMapKeyRef) || !has(self.format)",
            message="format is only for a prefix with configMapKeyRef",
            field_path=".format",
            holds=lambda prefix: prefix.config_map_key_ref is not None or prefix.format is None,
        ),
    )


class Readers(ApiModel):
    """Tenants that may read a pool. A tenant must also list the pool in its own policy."""

    public: bool | None = None
    """All tenants."""

    groups: Annotated[tuple[ObjectName, ...], Field(max_length=256), SetList()] = ()
    """The members of these TenantGroups."""

    tenants: Annotated[tuple[TenantName, ...], Field(max_length=1024), SetList()] = ()
    """These tenants."""

    RULES = (
        Rule(
            cel="(has(self.public) && self.public) || (has(self.groups) && size(self.groups) > 0) || "
            "(has(self.tenants) && size(self.tenants) > 0)",
            message="readers must name at least one of public: true, groups and tenants",
            holds=lambda readers: bool(readers.public or readers.groups or readers.tenants),
        ),
        Rule(
            cel="!(has(self.public) && self.public) || "
            "((!has(self.groups) || size(self.groups) == 0) && (!has(self.tenants) || size(self.tenants) == 0))",
            message="public: true means every tenant: remove groups and tenants, or set public to false",
            field_path=".public",
            holds=lambda readers: not (readers.public and (readers.groups or readers.tenants)),
        ),
    )


class PoolInvalidation(StrEnum):
    """How new content replaces old."""

    LAZY = "Lazy"
    EAGER = "Eager"


class Warmup(ApiModel):
    """How the pool's prefixes are computed."""

    max_concurrent: Annotated[int, Field(ge=1, le=64)] | None = None
    """Requests at one time. Absent means 1."""

    timeout: Annotated[Duration, Between("10s", "24h")] | None = None
    """Longest duration of warming. Absent means 10m."""

    before_ready: bool | None = None
    """Whether a new pod becomes ready only when its memory holds the pool. It waits for the timeout, but at most two
    minutes. Absent means false."""

    @property
    def is_before_ready(self) -> bool:
        """beforeReady, or its default."""
        return bool(self.before_ready)

    @property
    def effective_max_concurrent(self) -> int:
        """maxConcurrent, or its default."""
        return self.max_concurrent if self.max_concurrent is not None else 1

    @property
    def timeout_s(self) -> int:
        """Effective timeout in seconds."""
        return self.timeout.in_seconds if self.timeout is not None else 600


class PrefixPoolSpec(ApiModel):
    """Prefixes of one model that many tenants may read."""

    model_ref: Annotated[ObjectRef, Immutable("modelRef is immutable: create another PrefixPool for the other model")]
    """The CachedModel that the prefixes are for. Only its pods compute the chunks and hold the key that encrypts them,
    so a pool cannot move to another model."""

    prefixes: Annotated[tuple[Prefix, ...], Field(min_length=1, max_length=64), MapList()]
    """The prefixes."""

    readers: Readers
    """Tenants that may read the pool."""

    invalidation: PoolInvalidation | None = None
    """Lazy: readers keep the old content until the new is warm. Eager: readers lose the old content at once. Absent
    means Lazy."""

    pinned: bool | None = None
    """Whether the pool's blocks are never evicted. Their size is then a guarantee that the tiers must admit. Absent
    means false."""

    tiers: TierNames = ()
    """CacheTiers that hold the pool. Absent means the slowest tier of the model."""

    warmup: Warmup | None = None
    """How the prefixes are computed."""

    cache_generation: Generation | None = None
    """Raise it to compute the pool again."""

    @property
    def effective_warmup(self) -> Warmup:
        """warmup, or its defaults."""
        return self.warmup or Warmup()

    @property
    def effective_invalidation(self) -> PoolInvalidation:
        """invalidation, or its default."""
        return self.invalidation or PoolInvalidation.LAZY

    @property
    def is_pinned(self) -> bool:
        """Whether the pool's blocks are never evicted."""
        return bool(self.pinned)

    @property
    def effective_cache_generation(self) -> int:
        """cacheGeneration, 0 when absent."""
        return self.cache_generation or 0


class PoolTier(StatusModel):
    """Chunks of a pool that one tier holds."""

    name: ShortText
    """Name of the CacheTier."""

    stored: Count = 0
    """Chunks that are stored."""

    expected: Count = 0
    """Chunks of the pool."""

    bytes: Count = 0
    """Bytes of the stored chunks. Once all chunks were stored it keeps their size, also when some are lost."""


class PrefixStatus(StatusModel):
    """Result of rendering one prefix."""

    name: ShortText
    """Name of the prefix."""

    tokens: Count = 0
    """Tokens that no continuation changes: the part that a pool can hold."""

    chunks: Count = 0
    """Whole chunks of these tokens."""


class NextContent(StatusModel):
    """New content that will replace the current one."""

    scope: ScopeStatus
    """Its scope and epoch."""

    content_digest: Hex
    """Digest of the content of its prefixes."""

    render_id: Hex | None = Field(default=None, alias="renderID")
    """Engine, tokenizer and arguments that made its tokens, as in the pods' label kvstrata.io/render."""

    manifest_digest: Hex | None = None
    """Digest of its manifest, once every pod computed the same."""

    tokens: Count | None = None
    """Tokens of all its prefixes."""

    chunks: Count | None = None
    """Chunks of all its prefixes; common beginnings are counted once."""

    prefixes: Annotated[tuple[PrefixStatus, ...], Field(max_length=64), MapList()] = ()
    """Result of rendering each prefix."""

    published: bool | None = None
    """Whether readers know it already. They use both contents until every pod knows the new one and no pod makes the
    tokens of the current one."""

    warmed_at: Timestamp | None = None
    """When all of it was computed."""

    tiers: Annotated[tuple[PoolTier, ...], Field(max_length=16), MapList()] = ()
    """Chunks that each tier holds; of a tier in pods, those of the pod that holds least."""


class PrefixPoolStatus(Status):
    """Observed state of a PrefixPool."""

    scope: ScopeStatus | None = None
    """The pool's scope and its epoch."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""

    content_digest: Hex | None = None
    """Digest of the content of the prefixes, including that of ConfigMaps."""

    render_id: Hex | None = Field(default=None, alias="renderID")
    """Engine, tokenizer and arguments that made the tokens, as in the pods' label kvstrata.io/render."""

    tokens: Count | None = None
    """Tokens of all prefixes that no continuation changes."""

    chunks: Count | None = None
    """Whole chunks of all prefixes; common beginnings are counted once."""

    bytes: Quantity | None = None
    """Size of those chunks."""

    manifest_digest: Hex | None = None
    """Digest of the pool's manifest: the names of its chunks."""

    prefixes: Annotated[tuple[PrefixStatus, ...], Field(max_length=64), MapList()] = ()
    """Result of rendering each prefix."""

    next: NextContent | None = None
    """New content that is being computed while readers keep the current one."""

    published: bool | None = None
    """Whether readers know the current content."""

    warmed_at: Timestamp | None = None
    """When the current content was last computed."""

    tiers: Annotated[tuple[PoolTier, ...], Field(max_length=16), MapList()] = ()
    """Chunks that each tier holds; of a tier in pods, those of the pod that holds least."""

    usage: Usage | None = None
    """Bytes of the pool in the tiers."""

    admission: Admission | None = None
    """Admitted guarantees; absent if none was ever declared."""

    @property
    def epochs(self) -> frozenset[str]:
        """The epochs of the pool's content: the current one and the one that will replace it."""
        scopes = (self.scope, self.next.scope if self.next is not None else None)
        return frozenset(scope.epoch for scope in scopes if scope is not None)


class PrefixPool(Resource):
    """A PrefixPool holds prefixes that are computed once, stored once for each shared tier and read by many tenants.
    Tenants only read; pods of the model compute and store the pool on the operator's request."""

    INFO: ClassVar[KindInfo] = KindInfo(
        kind="PrefixPool",
        plural="prefixpools",
        short_names=("ppool",),
        columns=(
            Column("Model", ".spec.modelRef.name"),
            Column("Bytes", ".status.summary.bytes"),
            condition_column("Warm", "Warm"),
            *READY,
            condition_column("Published", "Published", priority=1),
            condition_column("Admitted", "Admitted", priority=1),
            Column("Tokens", ".status.tokens", "integer", priority=1),
            Column("Chunks", ".status.chunks", "integer", priority=1),
            AGE,
        ),
        selectable_fields=(".spec.modelRef.name",),
    )

    spec: PrefixPoolSpec
    status: PrefixPoolStatus = PrefixPoolStatus()

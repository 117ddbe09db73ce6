"""PrefixPool: prefixes that are computed once and read by many."""

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
    """Who speaks."""

    content: PrefixText
    """What is said."""


Messages = Annotated[tuple[Message, ...], Field(min_length=1, max_length=64), AtomicList()]


class SourceFormat(StrEnum):
    """What the key of a ConfigMap holds."""

    TEXT = "Text"
    CHAT = "Chat"


class Prefix(ApiModel):
    """One prefix, given in exactly one form."""

    name: ObjectName
    """Name of the prefix within its pool."""

    text: PrefixText | None = None
    """Text, tokenised as it is."""

    messages: Messages | None = None
    """Messages, rendered by the model's chat template."""

    tools: Annotated[tuple[AnyObject, ...], Field(max_length=128), AtomicList()] = ()
    """Tools that the chat template renders; with messages only. The API server keeps the keys of these objects in
    alphabetical order, and most templates render them in the order that they are in: callers must send theirs in the
    same order, or the prefix must come from a ConfigMap with format Chat, whose text is kept as it is."""

    chat_template_kwargs: AnyObject | None = None
    """Further arguments of the chat template; with messages only. Only simple values are taken, as from callers."""

    token_ids: TokenIds | None = Field(default=None, alias="tokenIDs")
    """Token ids."""

    config_map_key_ref: ConfigMapKeyRef | None = None
    """A ConfigMap's key that holds the prefix. It is read again within a minute of a change."""

    format: SourceFormat | None = None
    """What the ConfigMap's key holds, with configMapKeyRef only. Text: text, tokenised as it is. Chat: a JSON object
    with messages and optionally tools and chat_template_kwargs, as callers send them to /v1/chat/completions. Absent
    means Text."""

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
    """Who may read a pool. A tenant must also list the pool in its own policy."""

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
            message="public: true already means everyone: leave groups and tenants out, or set public to false",
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
    """How long warming may take. Absent means 10m."""

    before_ready: bool | None = None
    """Whether a new pod becomes ready only when the pool is warm in its memory, for at most the timeout or two minutes,
    whichever is shorter. Absent means false."""

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
    """Prefixes of one model that many may read."""

    model_ref: Annotated[ObjectRef, Immutable("modelRef is immutable: create another PrefixPool for the other model")]
    """The CachedModel that the prefixes are for. Its pods alone compute the chunks and hold the key that they are
    encrypted with, so a pool never moves to another."""

    prefixes: Annotated[tuple[Prefix, ...], Field(min_length=1, max_length=64), MapList()]
    """The prefixes."""

    readers: Readers
    """Who may read."""

    invalidation: PoolInvalidation | None = None
    """Lazy: readers keep the old content until the new is warm. Eager: the old is cut off at once. Absent means
    Lazy."""

    pinned: bool | None = None
    """Whether the pool's blocks are never evicted."""

    tiers: TierNames = ()
    """CacheTiers that hold the pool. Absent means the slowest tier of the model."""

    warmup: Warmup | None = None
    """How the prefixes are computed."""

    cache_generation: Generation | None = None
    """Raise it to compute the pool anew."""

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
    """How much of a pool one tier holds."""

    name: ShortText
    """Name of the CacheTier."""

    stored: Count = 0
    """Chunks that are stored."""

    expected: Count = 0
    """Chunks that there should be."""

    bytes: Count = 0
    """Bytes of the chunks that are stored; once all were, what they took, also when some are lost."""


class PrefixStatus(StatusModel):
    """What one prefix came to."""

    name: ShortText
    """Name of the prefix."""

    tokens: Count = 0
    """Tokens that no continuation changes: the part that a pool can hold."""

    chunks: Count = 0
    """Whole chunks of them."""


class NextContent(StatusModel):
    """Content that is to replace the one that readers have."""

    scope: ScopeStatus
    """Its scope and epoch."""

    content_digest: Hex
    """Digest of what its prefixes say."""

    render_id: Hex | None = Field(default=None, alias="renderID")
    """What rendered it."""

    manifest_digest: Hex | None = None
    """Digest of its manifest, once every pod came to the same."""

    tokens: Count | None = None
    """Tokens of all its prefixes."""

    chunks: Count | None = None
    """Chunks of all its prefixes; those that begin alike are counted once."""

    prefixes: Annotated[tuple[PrefixStatus, ...], Field(max_length=64), MapList()] = ()
    """What each prefix came to."""

    published: bool | None = None
    """Whether readers are told of it, too: both are read until no pod makes the tokens of the other any more."""

    warmed_at: Timestamp | None = None
    """When all of it was computed."""

    tiers: Annotated[tuple[PoolTier, ...], Field(max_length=16), MapList()] = ()
    """How much each tier holds; of a tier within pods, the pod that holds least."""


class PrefixPoolStatus(Status):
    """Observed state of a PrefixPool."""

    scope: ScopeStatus | None = None
    """The pool's scope and its epoch."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""

    content_digest: Hex | None = None
    """Digest of what the prefixes say, with what ConfigMaps hold."""

    render_id: Hex | None = Field(default=None, alias="renderID")
    """Engine, tokenizer and arguments that made tokens of it, as on the pods' label kvstrata.io/render."""

    tokens: Count | None = None
    """Tokens of all prefixes that no continuation changes."""

    chunks: Count | None = None
    """Whole chunks of all prefixes; those that begin alike are counted once."""

    bytes: Quantity | None = None
    """Size of those chunks."""

    manifest_digest: Hex | None = None
    """Digest of the pool's manifest: the names of its chunks."""

    prefixes: Annotated[tuple[PrefixStatus, ...], Field(max_length=64), MapList()] = ()
    """What each prefix came to."""

    next: NextContent | None = None
    """Content that is being computed while readers keep the one above."""

    published: bool | None = None
    """Whether readers are told of the content above."""

    warmed_at: Timestamp | None = None
    """When the content above was last computed."""

    tiers: Annotated[tuple[PoolTier, ...], Field(max_length=16), MapList()] = ()
    """How much each tier holds; of a tier within pods, the pod that holds least."""

    usage: Usage | None = None
    """What the pool holds in the tiers."""

    admission: Admission | None = None
    """The guarantees that were admitted; absent where none was ever declared."""

    @property
    def epochs(self) -> frozenset[str]:
        """The epochs of the pool's content: the one in force and the one that is to replace it."""
        scopes = (self.scope, self.next.scope if self.next is not None else None)
        return frozenset(scope.epoch for scope in scopes if scope is not None)


class PrefixPool(Resource):
    """A PrefixPool holds prefixes that are computed once, stored once for each shared tier and read by many. Tenants
    only read; the pool is written by its warmer alone."""

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

"""PrefixPool: prefixes that are computed once and read by many tenants."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from kvstrata.api.base import READY, ApiModel, Column, KindInfo, Resource, Rule, StatusModel, exactly_one_of
from kvstrata.api.common import AnyObject, ConfigMapKeyRef, ObjectRef, TierNames
from kvstrata.api.markers import atomic_list, between, immutable, map_list, set_list
from kvstrata.api.scalars import Count, Duration, Generation, ObjectName, Quantity, ShortText, TenantName, Timestamp
from kvstrata.api.status import Admission, Hex, ResolvedIdentity, ScopeStatus, Status, Usage

MAX_IDENTITIES = 16
"""Most identities in a pool's status."""

PrefixText = Annotated[str, StringConstraints(min_length=1, max_length=262_144)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=131_072), atomic_list()]


class Message(ApiModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    """Role of the author."""

    content: PrefixText
    """Text of the message."""


Messages = Annotated[tuple[Message, ...], Field(min_length=1, max_length=64), atomic_list()]


class SourceFormat(StrEnum):
    """Content of a ConfigMap's key."""

    TEXT = "Text"
    CHAT = "Chat"


class PrefixContent(ApiModel):
    """The content of the prefix, given in exactly one form."""

    text: PrefixText | None = None
    """Text, tokenised without a chat template."""

    messages: Messages | None = None
    """Messages, rendered by the model's chat template."""

    token_ids: TokenIds | None = Field(default=None, alias="tokenIDs")
    """Token ids."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one_of(("text", "messages", "tokenIDs"), "content needs exactly one of text, messages and tokenIDs"),
    )

    @property
    def chat(self) -> dict[str, Any] | None:
        """The messages as a body of /v1/chat/completions."""
        if self.messages is None:
            return None
        return {"messages": [{"role": one.role, "content": one.content} for one in self.messages]}


class Prefix(PrefixContent):
    """One prefix, given in exactly one form."""

    name: ObjectName
    """Name of the prefix within its pool."""

    tools: Annotated[tuple[AnyObject, ...], Field(max_length=128), atomic_list()] = ()
    """Tools that the chat template renders; with messages only. The API server stores the keys of these objects in
    alphabetical order, and most templates render keys in the order of the object. Callers must therefore send the same
    order; or use a ConfigMap with format Chat, whose text keeps its order."""

    chat_template_kwargs: AnyObject | None = None
    """Further arguments of the chat template; with messages only. Only simple values are accepted, as from callers."""

    config_map_key_ref: ConfigMapKeyRef | None = None
    """Key of a ConfigMap that holds the prefix. A change is read within a minute."""

    format: SourceFormat = SourceFormat.TEXT
    """Form of the ConfigMap's key, with configMapKeyRef only. Text: text, tokenised without a chat template. Chat: a
    JSON object with messages and optionally tools and chat_template_kwargs, as callers send them to
    /v1/chat/completions. Absent means Text."""

    RULES = (
        exactly_one_of(
            ("text", "messages", "tokenIDs", "configMapKeyRef"),
            "a prefix needs exactly one of text, messages, tokenIDs and configMapKeyRef",
        ),
        Rule(
            cel="has(self.messages) || (!has(self.tools) && !has(self.chatTemplateKwargs))",
            message="tools and chatTemplateKwargs are only for a prefix with messages",
            holds=lambda one: one.messages is not None or (not one.tools and one.chat_template_kwargs is None),
        ),
        Rule(
            cel="has(self.configMapKeyRef) || !has(self.format)",
            message="format is only for a prefix with configMapKeyRef",
            field_path=".format",
            holds=lambda prefix: prefix.config_map_key_ref is not None or "format" not in prefix.model_fields_set,
        ),
    )

    @property
    def chat(self) -> dict[str, Any] | None:
        more = {"tools": list(self.tools), "chat_template_kwargs": self.chat_template_kwargs}
        return {**chat, **more} if (chat := super().chat) is not None else None


class Readers(ApiModel):
    """Tenants that may read a pool. A tenant must also list the pool in its own policy."""

    public: bool | None = None
    """All tenants."""

    groups: Annotated[tuple[ObjectName, ...], Field(max_length=256), set_list()] = ()
    """The members of these TenantGroups."""

    tenants: Annotated[tuple[TenantName, ...], Field(max_length=1024), set_list()] = ()
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

    max_concurrent: Annotated[int, Field(ge=1, le=64)] = 1
    """Requests at one time. Absent means 1."""

    timeout: Annotated[Duration, between("10s", "24h")] = Duration("10m")
    """Longest duration of warming. Absent means 10m."""

    before_ready: bool = False
    """Whether a new pod becomes ready only when its memory holds the pool. It waits for the timeout, but at most two
    minutes. Absent means false."""


class PrefixPoolSpec(ApiModel):
    """Prefixes of one model that many tenants may read."""

    model_ref: Annotated[ObjectRef, immutable("modelRef is immutable: create another PrefixPool for the other model")]
    """The CachedModel that the prefixes are for. Only its pods compute the chunks and hold the key that encrypts them,
    so a pool cannot move to another model."""

    prefixes: Annotated[tuple[Prefix, ...], Field(min_length=1, max_length=64), map_list()]
    """The prefixes."""

    readers: Readers
    """Tenants that may read the pool."""

    invalidation: PoolInvalidation = PoolInvalidation.LAZY
    """Lazy: readers keep the old content until the new is warm. Eager: readers lose the old content at once. Absent
    means Lazy."""

    pinned: bool = False
    """Whether the pool's blocks are never evicted. Their size is then a guarantee that the tiers must admit. Absent
    means false."""

    tiers: TierNames = ()
    """CacheTiers that hold the pool. Absent means the slowest tier of the model."""

    warmup: Warmup = Warmup()
    """How the prefixes are computed."""

    cache_generation: Generation = 0
    """Raise it to compute the pool again."""


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


class PoolContent(StatusModel):
    """Content of a pool, and how far it is computed."""

    scope: ScopeStatus | None = None
    """Scope and epoch of the content."""

    content_digest: Hex | None = None
    """Digest of the prefixes, including the content of ConfigMaps."""

    render_id: Hex | None = Field(default=None, alias="renderID")
    """Engine, tokenizer and arguments that made the tokens, as in the pods' label kvstrata.io/render."""

    manifest_digest: Hex | None = None
    """Digest of the manifest, the names of the chunks, once every pod computed the same."""

    tokens: Count | None = None
    """Tokens of all prefixes that no continuation changes."""

    chunks: Count | None = None
    """Whole chunks of all prefixes; common beginnings are counted once."""

    prefixes: Annotated[tuple[PrefixStatus, ...], Field(max_length=64), map_list()] = ()
    """Result of rendering each prefix."""

    published: bool | None = None
    """Whether readers know the content. They use the current and the next one until every pod knows the next one and no
    pod makes the tokens of the current one."""

    warmed_at: Timestamp | None = None
    """When all of the content was last computed."""

    identities: Annotated[tuple[ResolvedIdentity, ...], Field(max_length=MAX_IDENTITIES), atomic_list()] = ()
    """Cache identities, with fingerprints, of the pods that served when every tier held every chunk of each of them; at
    most 16. A pod with another one finds none of the chunks, and computes them again."""

    tiers: Annotated[tuple[PoolTier, ...], Field(max_length=16), map_list()] = ()
    """Chunks that each tier holds; of a tier in pods, those of the pod that holds least."""


class NextContent(PoolContent):
    """New content that will replace the current one."""

    scope: ScopeStatus
    """Its scope and epoch."""

    content_digest: Hex
    """Digest of the content of its prefixes."""


class PrefixPoolStatus(PoolContent, Status):
    """Observed state of a PrefixPool."""

    cache_generation: Generation | None = None
    """The cacheGeneration that was last acted on."""

    bytes: Quantity | None = None
    """Size of the chunks."""

    next: NextContent | None = None
    """New content that is being computed while readers keep the current one."""

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
            Column.of_condition("Warm", "Warm"),
            *READY,
            Column.of_condition("Published", "Published", priority=1),
            Column.of_condition("Admitted", "Admitted", priority=1),
            Column("Tokens", ".status.tokens", "integer", priority=1),
            Column("Chunks", ".status.chunks", "integer", priority=1),
        ),
        selectable_fields=(".spec.modelRef.name",),
    )

    spec: PrefixPoolSpec
    status: PrefixPoolStatus = PrefixPoolStatus()

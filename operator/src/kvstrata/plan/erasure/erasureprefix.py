"""The prefix that an invalidation names: what it says, and which chunks pods make of it.

Pods name chunks by the engine's tokenizer and the cache server's hash, as they do for pools. Every live pod of the
model has to have the newest template, has to answer, and has to agree: one with another template makes other chunks of
the same chat. Only whole chunks that no continuation changes are of the prefix: what follows it, and the end of it that
fills no chunk, have names that depend on what callers sent. What pods that are gone made of a chat with another
template, or any pod of the same messages with `tools`, has other names, which nobody can tell afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation, PrefixScope
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.contract.messages.erase import MAX_VERIFIED_CHUNKS
from kvstrata.contract.messages.pools import MAX_SOURCE_BYTES
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.pools import CHUNK_HASH_BYTES
from kvstrata.contract.wire import digest
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision
from kvstrata.plan.pools.content import Content
from kvstrata.plan.pools.rendering import ASK_AGAIN_S, render
from kvstrata.plan.questions import RenderPool

_NAME = "content"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where the naming of a prefix stands: its `chunks`, as hexadecimal digits, or why there are none (`objection`) or
    none yet (`pending`). `questions` are to be asked now, `again_s` is when there may be more.
    """

    chunks: tuple[str, ...] = field(default=(), repr=False)
    objection: Decision | None = None
    pending: Decision | None = None
    questions: tuple[RenderPool, ...] = ()
    again_s: float | None = None


def source_of(prefix: PrefixScope) -> PrefixSource:
    """Return what a prefix says, in the form in which it is rendered."""
    content = prefix.content
    if content.text is not None:
        return PrefixSource(text=content.text)
    if content.token_ids is not None:
        return PrefixSource(token_ids=content.token_ids)
    messages = [{"role": one.role, "content": one.content} for one in content.messages or ()]
    return PrefixSource(chat={"messages": messages})


def chunks_of(world: World, invalidation: CacheInvalidation, now: datetime) -> Prefix:
    """Return which chunks pods make of an invalidation's prefix, as far as they said."""
    prefix = invalidation.spec.scope.prefix
    model = world.models.get(prefix.model_ref.name) if prefix is not None else None
    if prefix is None or model is None:
        return Prefix(objection=Decision(R.MODEL_NOT_FOUND, "the prefix's CachedModel does not exist"))
    source = source_of(prefix)
    size = len(source.encode())
    if size > MAX_SOURCE_BYTES:
        return _refused(f"the prefix has {size} bytes, and no more than {MAX_SOURCE_BYTES} are rendered: shorten it")
    content = Content({_NAME: source}, {_NAME: source.digest}, digest([source.digest]))
    said = render(world, model, invalidation.name, content, now, asker=invalidation.INFO.kind, by_all=True)
    if said.objection is not None:
        return _refused(said.objection.message, said.questions)
    if said.agreed is None:
        why = said.pending.message if said.pending is not None else "pods are asked"
        waiting = Decision(R.NAMING_CHUNKS, f"pods are to name the chunks of the prefix: {why}")
        # A pod that is away, or has another template, is to be looked at again sooner than those that answered.
        again_s = min(said.again_s or ASK_AGAIN_S, ASK_AGAIN_S)
        return Prefix(pending=waiting, questions=said.questions, again_s=again_s)
    hashes = said.agreed.hashes
    count = len(hashes) // CHUNK_HASH_BYTES
    if count > MAX_VERIFIED_CHUNKS:
        return _refused(f"the prefix has {count} chunks, and {MAX_VERIFIED_CHUNKS} are erased at a time: shorten it")
    named = tuple(hashes[at : at + CHUNK_HASH_BYTES].hex() for at in range(0, len(hashes), CHUNK_HASH_BYTES))
    return Prefix(named, questions=said.questions, again_s=said.again_s)


def _refused(why: str, questions: tuple[RenderPool, ...] = ()) -> Prefix:
    return Prefix(objection=Decision(R.PREFIX_REFUSED, f"{why}; nothing was done"), questions=questions)

"""The prefix of an invalidation, and its chunks as named by pods.

Every live pod of the model must have the newest template, answer and agree, because another template makes other chunks
of the same chat. Only whole chunks that no continuation changes belong to the prefix: names of later ones depend on
callers. Chunks of former templates, or of the same messages with `tools`, have other names, which cannot be found.
"""

from __future__ import annotations

from datetime import datetime

from kvstrata.api.cacheinvalidation import CacheInvalidation
from kvstrata.api.reasons import InvalidationReason as R
from kvstrata.api.reasons import SharedReason
from kvstrata.contract.messages.erase import MAX_VERIFIED_CHUNKS
from kvstrata.contract.messages.pools import MAX_SOURCE_BYTES
from kvstrata.contract.policy.pools import split_hashes
from kvstrata.contract.wire import digest
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Question
from kvstrata.plan.pools.content import Content, Progress, given_source
from kvstrata.plan.pools.rendering import ASK_AGAIN_S, render

_NAME = "content"


def chunks_of(world: World, invalidation: CacheInvalidation, now: datetime) -> Progress[tuple[str, ...]]:
    """Return the progress of naming the chunks of an invalidation's prefix, in hexadecimal."""
    prefix = invalidation.spec.scope.prefix
    model = world.models.get(prefix.model_ref.name) if prefix is not None else None
    if prefix is None or model is None:
        return Progress(objection=Decision(SharedReason.MODEL_NOT_FOUND, "the prefix's CachedModel does not exist"))
    source = given_source(prefix.content)
    size = len(source.encode())
    if size > MAX_SOURCE_BYTES:
        return _refused(f"the prefix has {size} bytes, and no more than {MAX_SOURCE_BYTES} are rendered: shorten it")
    content = Content({_NAME: source}, {_NAME: source.digest}, digest([source.digest]))
    answer = render(world, model, invalidation.name, content, now, asker=invalidation.INFO.kind, by_all=True)
    if answer.objection is not None:
        return _refused(answer.objection.message, answer.questions)
    if answer.made is None:
        why = answer.pending.message if answer.pending is not None else "pods are asked"
        waiting = Decision(R.NAMING_CHUNKS, f"pods are to name the chunks of the prefix: {why}")
        # An absent pod, or one with another template, is asked again sooner than those that answered.
        again_s = min(answer.again_s or ASK_AGAIN_S, ASK_AGAIN_S)
        return Progress(pending=waiting, questions=answer.questions, again_s=again_s)
    named = tuple(chunk.hex() for chunk in split_hashes(answer.made.hashes))
    if len(named) > MAX_VERIFIED_CHUNKS:
        most = f"{MAX_VERIFIED_CHUNKS} are erased at a time: shorten it"
        return _refused(f"the prefix has {len(named)} chunks, and {most}")
    return Progress(named, questions=answer.questions, again_s=answer.again_s)


def _refused(why: str, questions: tuple[Question, ...] = ()) -> Progress[tuple[str, ...]]:
    return Progress(objection=Decision(R.PREFIX_REFUSED, f"{why}; nothing was done"), questions=questions)

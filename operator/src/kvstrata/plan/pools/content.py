"""Content of a PrefixPool: its prefixes, with values of ConfigMaps, and a digest.

ConfigMaps are read once a minute and when their pool changes: a watch would keep all ConfigMaps of a cluster in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from kvstrata.api.prefixpool import Prefix, PrefixContent, PrefixPool, SourceFormat
from kvstrata.api.reasons import PoolReason
from kvstrata.contract import ContractError
from kvstrata.contract.messages.pools import MAX_SOURCE_BYTES
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.wire import digest
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, Question, ReadSource

T = TypeVar("T")

READ_AGAIN_S = 60.0
READ_AT_AN_EDIT_S = 2.0
"""Maximum age of values after an edit of the pool: both are often edited together."""


@dataclass(frozen=True, slots=True)
class Content:
    """The prefixes of a pool by name, in the order of its spec. `digest` ignores names, order and repetitions."""

    prefixes: Mapping[str, PrefixSource] = field(repr=False)
    digests: Mapping[str, str]
    digest: str

    @property
    def distinct(self) -> Mapping[str, PrefixSource]:
        return {self.digests[name]: source for name, source in self.prefixes.items()}


@dataclass(frozen=True, slots=True)
class Progress(Generic[T]):
    """Progress of something that is made from answers: `made`, or why it is not yet (`pending`), or never
    (`objection`). `questions` are asked now, and the next ones in `again_s`."""

    made: T | None = None
    objection: Decision | None = None
    pending: Decision | None = None
    questions: tuple[Question, ...] = ()
    again_s: float | None = None


def content_of(world: World, pool: PrefixPool) -> Content | Decision | None:
    """Return the content of a pool by the last reads, or its problem; None before all was read."""
    texts: dict[tuple[str, str], str] = {}
    for where in sources_of(pool):
        found = world.sources.get(where)
        if found is None:
            return None
        if found.problem:
            return Decision(PoolReason.SOURCE_NOT_FOUND, f"{found.problem}: create it or correct configMapKeyRef")
        texts[where] = found.text or ""
    return world.memo.get(PrefixPool, pool.name, (pool.spec, texts), lambda: _content(pool, texts))


def sources_of(pool: PrefixPool) -> tuple[tuple[str, str], ...]:
    """Return the ConfigMap names and keys that a pool's prefixes come from."""
    refs = (prefix.config_map_key_ref for prefix in pool.spec.prefixes)
    return tuple(dict.fromkeys((ref.name, ref.key) for ref in refs if ref is not None))


def read_sources(world: World, pool: PrefixPool, now: datetime) -> Progress[Content]:
    named = sources_of(pool)
    ages = {where: (now - world.sources[where].at).total_seconds() for where in named if where in world.sources}
    edited = pool.status.observed_generation != pool.generation
    due_s = READ_AT_AN_EDIT_S if edited else READ_AGAIN_S
    questions = tuple(ReadSource(*where) for where in named if ages.get(where, READ_AGAIN_S) >= due_s)
    again_s = READ_AGAIN_S - max((age for age in ages.values() if age < READ_AGAIN_S), default=0.0) if named else None
    made = content_of(world, pool)
    if isinstance(made, Decision):
        return Progress(objection=made, questions=questions, again_s=again_s)
    reading = Decision(PoolReason.RENDERING, "the ConfigMaps that it names are being read")
    return Progress(made, pending=None if made else reading, questions=questions, again_s=again_s)


def given_source(content: PrefixContent) -> PrefixSource:
    """Return the source of a prefix that is in the object itself. Raises ContractError for none."""
    return PrefixSource(text=content.text, chat=content.chat, token_ids=content.token_ids)


def _content(pool: PrefixPool, texts: Mapping[tuple[str, str], str]) -> Content | Decision:
    prefixes: dict[str, PrefixSource] = {}
    digests: dict[str, str] = {}
    for prefix in pool.spec.prefixes:
        try:
            source = _source(prefix, texts)
        except ContractError as error:
            return Decision(PoolReason.SOURCE_REFUSED, f"prefix {prefix.name}: {error}")
        size = len(source.encode())
        if size > MAX_SOURCE_BYTES:
            most = f"no more than {MAX_SOURCE_BYTES} are rendered: shorten it"
            return Decision(PoolReason.PREFIX_TOO_LONG, f"prefix {prefix.name} has {size} bytes, and {most}")
        prefixes[prefix.name], digests[prefix.name] = source, source.digest
    return Content(prefixes, digests, digest(sorted(set(digests.values()))))


def _source(prefix: Prefix, texts: Mapping[tuple[str, str], str]) -> PrefixSource:
    """Return a prefix's source. Raises ContractError for an empty one, and for a document that is no chat."""
    where = prefix.config_map_key_ref
    if where is None:
        return given_source(prefix)
    text = texts.get((where.name, where.key), "")
    if not text:
        raise ContractError("its ConfigMap's key holds no text")
    return PrefixSource.from_document(text) if prefix.format is SourceFormat.CHAT else PrefixSource(text=text)

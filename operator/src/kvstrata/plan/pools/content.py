"""Content of a PrefixPool: its prefixes, with values of ConfigMaps, and a digest.

ConfigMaps are read once a minute and when their pool changes: a watch would keep all ConfigMaps of a cluster in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kvstrata.api.prefixpool import Prefix, PrefixPool, SourceFormat
from kvstrata.api.reasons import PoolReason
from kvstrata.contract import ContractError
from kvstrata.contract.messages.pools import MAX_SOURCE_BYTES
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.wire import digest
from kvstrata.model.world import World
from kvstrata.plan.actions import Decision, ReadSource

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
class Sources:
    """A pool's content, or why there is none, or neither before all is read. `questions` are ConfigMap keys to read
    now."""

    content: Content | None = None
    objection: Decision | None = None
    questions: tuple[ReadSource, ...] = ()
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


def read_sources(world: World, pool: PrefixPool, now: datetime) -> Sources:
    named = sources_of(pool)
    ages = {where: (now - world.sources[where].at).total_seconds() for where in named if where in world.sources}
    edited = pool.status.observed_generation != pool.generation
    due_s = READ_AT_AN_EDIT_S if edited else READ_AGAIN_S
    questions = tuple(ReadSource(*where) for where in named if ages.get(where, READ_AGAIN_S) >= due_s)
    again_s = READ_AGAIN_S - max((age for age in ages.values() if age < READ_AGAIN_S), default=0.0) if named else None
    made = content_of(world, pool)
    content, objection = (None, made) if isinstance(made, Decision) else (made, None)
    return Sources(content, objection, questions, again_s)


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
    if prefix.text is not None:
        return PrefixSource(text=prefix.text)
    if prefix.token_ids is not None:
        return PrefixSource(token_ids=prefix.token_ids)
    if prefix.messages is not None:
        chat = {
            "messages": [{"role": message.role, "content": message.content} for message in prefix.messages],
            "tools": list(prefix.tools),
            "chat_template_kwargs": prefix.chat_template_kwargs or {},
        }
        return PrefixSource(chat=chat)
    where = prefix.config_map_key_ref
    text = texts.get((where.name, where.key), "") if where is not None else ""
    if not text:
        raise ContractError("its ConfigMap's key holds no text")
    return PrefixSource.from_document(text) if prefix.format is SourceFormat.CHAT else PrefixSource(text=text)

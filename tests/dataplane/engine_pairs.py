"""Requests in pairs through a gate and its engine, one that must hit and one that must miss, while policies change.

Each of a pair has the same prompt of one chunk and a token more. Who misses computes and stores it as its own, so
everybody is asked for somebody else's prompt once.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from kvstrata.contract.messages.engine_reset import RESET_PATH, EngineResetAnswer, ResetOutcome, ResetRequest
from kvstrata.contract.messages.pools import WARM_PATH, Warmed, WarmOutcome, WarmRequest
from kvstrata.contract.messages.prefix import PrefixSource
from kvstrata.contract.policy.data_key import DataKey
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS, Scope, ScopeKind
from kvstrata.contract.policy.pools import PoolShard, PoolVersion, pack_hashes
from tests.dataplane.engine_process import CHUNK_TOKENS, MODEL
from tests.dataplane.moving_scopes import Caller, Cast, Play, pool
from tests.dataplane.test_pool_engine import names, posted, say
from tests.gate.world import World, post, until

AT_ONCE = 16
POOL_PROMPTS = 12
"""Prefixes of a pool, of one chunk each."""

STORED_WITHIN_S = 60.0


@dataclass(frozen=True)
class Pair:
    """A prompt of `owner`, who has to find it, and who must not; `relies_on` has not to change meanwhile."""

    owner: Scope
    prompt: int
    own: Caller
    other: Caller
    relies_on: dict[Scope, int]


@dataclass
class Seen:
    """What came of pairs: how many count, by who asks and whose prompt it is, and what should not be.

    `first` counts requests for what nobody should have: whoever asks has just come, or has a new epoch.
    """

    first: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    set_aside: int = 0


class EnginePairs:
    """The pairs of one play, for a gate that is started; `callers` are who asks, all unless they are named."""

    def __init__(self, world: World, play: Play, chance: random.Random, callers: Collection[str] = ()) -> None:
        self._world = world
        self._play = play
        self._chance = chance
        self._callers = sorted(callers or play.now.callers)
        self._asked: set[tuple[str, Scope, int]] = set()
        """Under which keyspaces others' prompts were asked for: from then on they are there."""
        self._stored: defaultdict[tuple[Scope, int], set[str]] = defaultdict(set)
        """Under which keyspaces their owner has computed prompts."""
        self._keys: dict[str, tuple[DataKey, ...]] = {}
        self._hashes: dict[Scope, bytes] = {}
        self.seen = Seen()

    async def run(self, done: Callable[[Seen], bool], most: int) -> Seen:
        """Ask pairs, in batches, until it is done, but not more than `most`; a policy changes during each batch."""
        await self._world.publish_keys(**{name: key_of(name) for name in self._play.now.callers})
        await until(lambda: len(self._world.gate.keys.ring) == len(self._play.now.callers))
        for name in self._play.now.pools:
            chunks = [await names(self._world, prompt(pool(name), number)[:-1]) for number in range(POOL_PROMPTS)]
            self._hashes[pool(name)] = pack_hashes({one for some in chunks for one in some})
        await self._enforce(self._play.now)
        for batch in count():
            if done(self.seen) or self.seen.pairs.total() >= most:
                break
            await self._furnish()
            drawn = self._draw()
            await self._store(drawn)
            if batch % 2:
                await self._empty_engine()
            changing = asyncio.create_task(self._change())
            await self._ask(drawn)
            await changing
            self._note_changed(drawn)
        return self.seen

    def _draw(self) -> list[Pair]:
        """Draw pairs of what is in force now; nobody is asked for what it has computed itself."""
        cast, pairs = self._play.now, list[Pair]()
        callers = [cast.callers[name] for name in self._callers]
        while len(pairs) < AT_ONCE:
            own = self._chance.choice(callers)
            owner = self._chance.choice([one for one in sorted(cast.scopes()) if own in cast.readers(one)])
            other = self._chance.choice([one for one in callers if one not in cast.readers(owner)])
            space, mine = cast.space(other.scope), cast.space(own.scope)
            numbers = range(POOL_PROMPTS) if owner.kind is ScopeKind.POOL else count()
            number = next(
                (one for one in numbers if self._asked.isdisjoint({(space, owner, one), (mine, owner, one)})), None
            )
            if number is not None:
                self._asked.add((space, owner, number))
                # A caller's own scope is touched whenever its policy is, whichever scope it is in.
                scopes = {owner, own.scope, other.scope, *(Scope(ScopeKind.TENANT, one.name) for one in (own, other))}
                pairs.append(Pair(owner, number, own, other, self._play.begun(*scopes)))
        return pairs

    async def _store(self, pairs: list[Pair]) -> None:
        """Have owners compute what they have not yet: they find nothing of what their former epochs have."""
        cast, asked = self._play.now, dict[tuple[Scope, int], Caller]()
        for pair in pairs:
            where = pair.owner, pair.prompt
            if pair.owner.kind is not ScopeKind.POOL and cast.space(pair.owner) not in self._stored[where]:
                asked[where] = pair.own
        found = await asyncio.gather(*(self._cached(caller, *where) for where, caller in asked.items()))
        for where, cached in zip(asked, found, strict=True):
            kind = f"{'Former epoch' if self._stored[where] else 'Nobody'} / {where[0].kind}"
            self.seen.first[kind] += 1
            self.seen.foreign[kind] += bool(cached)
            self.seen.unanswered += cached is None
            self._stored[where].add(cast.space(where[0]))
        await self._until_stored(asked)

    async def _until_stored(self, asked: dict[tuple[Scope, int], Caller]) -> None:
        """Wait until the cache server has what was computed: it is stored after it was answered."""
        give_up_at_s = time.monotonic() + STORED_WITHIN_S
        while asked:
            assert time.monotonic() < give_up_at_s, f"never found by who has computed it: {asked}"
            await self._empty_engine()
            found = await asyncio.gather(*(self._cached(caller, *where) for where, caller in asked.items()))
            asked = {where: asked[where] for where, cached in zip(asked, found, strict=True) if not cached}

    async def _ask(self, pairs: list[Pair]) -> None:
        owners = asyncio.gather(*(self._cached(pair.own, pair.owner, pair.prompt) for pair in pairs))
        others = asyncio.gather(*(self._cached(pair.other, pair.owner, pair.prompt) for pair in pairs))
        for pair, hit, foreign in zip(pairs, await owners, await others, strict=True):
            if not self._play.counts(pair.relies_on):
                self.seen.set_aside += 1
                continue
            kind = self._play.kind(pair.other, pair.owner)
            self.seen.pairs[kind] += 1
            self.seen.missed[kind] += hit != CHUNK_TOKENS
            self.seen.foreign[kind] += bool(foreign)
            self.seen.unanswered += None in (hit, foreign)

    def _note_changed(self, pairs: list[Pair]) -> None:
        """Note what callers may have computed as what they became meanwhile: they may find that from now on."""
        cast = self._play.now
        for pair in pairs:
            if not self._play.counts(pair.relies_on):
                for caller in (pair.own, pair.other):
                    self._asked.add((cast.space(cast.callers[caller.name].scope), pair.owner, pair.prompt))

    async def _cached(self, caller: Caller, owner: Scope, number: int) -> int | None:
        """Ask as a caller; return how many tokens of the prompt were not computed, None without an answer."""
        body = {"model": MODEL, "prompt": prompt(owner, number), "max_tokens": 1, "temperature": 0}
        answer = await self._world.ask(post("/v1/completions", body, key_of(caller.name)))
        if answer.status != 200 or not answer.complete:
            return None
        return int((answer.json["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def _furnish(self) -> None:
        """Have pools that came warmed and published. What others have is stored when somebody is asked for it."""
        for scope, space in self._play.missing():
            if scope.kind is ScopeKind.POOL:
                await self._warm(scope, space)
            self._play.stored(scope, space)
        with self._play.publish() as cast:
            if cast is not None:
                await self._enforce(cast)

    async def _warm(self, scope: Scope, space: str) -> None:
        (version,) = self._versions(self._play.now)[scope.name]
        for number in range(POOL_PROMPTS):
            prefix = PrefixSource(token_ids=tuple(prompt(scope, number)[:-1]))
            request = WarmRequest(f"uid-{scope.name}", space[:SCOPE_DIGITS], version.manifest, prefix)
            said = Warmed.decode(await say(self._world, posted(WARM_PATH, request.encode())))
            assert said.outcome is WarmOutcome.STORED

    async def _change(self) -> None:
        with self._play.change() as cast:
            await self._enforce(cast)

    async def _enforce(self, cast: Cast) -> None:
        shards = {
            number: PoolShard(name, f"uid-{name}", versions)
            for number, (name, versions) in enumerate(sorted(self._versions(cast).items()))
        }
        await self._world.acked(await self._world.publish(self._play.entries(cast, self._data_keys), pools=shards))

    def _versions(self, cast: Cast) -> dict[str, tuple[PoolVersion, ...]]:
        return self._play.versions(cast, self._hashes.__getitem__, self._data_keys)

    def _data_keys(self, space: str) -> tuple[DataKey, ...]:
        return self._keys.setdefault(space, (DataKey(1, os.urandom(32)),))

    async def _empty_engine(self) -> None:
        """Empty the engine's own memory, so that its cache server has to answer."""
        said = EngineResetAnswer.decode(await say(self._world, posted(RESET_PATH, ResetRequest(60_000).encode())))
        assert said.outcome is ResetOutcome.RESET


def key_of(caller: str) -> str:
    """A caller's API key."""
    return f"key-of-{caller}"


def prompt(owner: Scope, number: int) -> list[int]:
    """The tokens of one of an owner's prompts: a chunk and one more."""
    return random.Random(f"{owner}/{number}").choices(range(3, 250), k=CHUNK_TOKENS + 1)

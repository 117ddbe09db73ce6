"""What a tier is to the rest of a cache server: to LMCache's plugin, to the runtime, to the gate's link and metrics.

Whatever keeps its blocks, a tier takes tasks, answers each once, and tells what it holds. Nothing here but `delete`,
`sizes`, `hottest`, `erase` and `close` may block its caller: LMCache's two loops serve all tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.messages.erase import ErasedTier
from kvstrata_sidecar.adapter.tier.counts import Histogram
from kvstrata_sidecar.adapter.tier.hot import Hot
from kvstrata_sidecar.adapter.tier.tasks import Key, StoreOutcome, Task


class Block(NamedTuple):
    """What LMCache names one block by, and its own key object `key`, which is handed back untouched."""

    key: Key
    keyspace: str
    rank: int
    group: int
    chunk_hash: bytes


class PodTier(Protocol):
    """A tier of one cache server under the pod's enforcement.

    `per_pod` is whether its blocks are this pod's alone, so that what scopes hold in it adds up over pods.
    """

    per_pod: bool

    def store(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Begin to store blocks from `views`; return the task's id. What is refused counts as stored with 0 bytes."""

    def hand_down(
        self, blocks: Sequence[Block], views: Sequence[memoryview], within_s: float, done: Callable[[Task], None]
    ) -> None:
        """Begin to store blocks that are about to leave the memory, as `store` does, within `within_s` seconds at most.

        `done` is called once nothing touches the views any more, from any thread, also before this returns. Of its task
        `found` says which blocks are here now, `keys` and `sizes` what was written for that.
        """

    def life_s(self, block: Block) -> float:
        """Return how long after its tokens were computed the policy lets a block live here, 0 for not at all."""

    def takes(self, block: Block) -> bool:
        """Whether a block could be stored here now, as far as that is known without waiting."""

    def lookup(self, blocks: Sequence[Block]) -> int:
        """Begin to look blocks up; return the task's id. Whatever is not known by the deadline is a miss."""

    def holds(self, keyspace: str, block: Block) -> bool:
        """Whether a block could be read here now, as far as that is known without waiting; it is no use of it."""

    def sizes(self, blocks: Sequence[Block]) -> Sequence[int]:
        """Return how many bytes each block takes here, 0 for what cannot be read here or not be told in time; it is no
        use of them.
        """

    def hottest(self, keyspaces: Sequence[str]) -> list[Hot] | None:
        """Return the blocks of these keyspaces that were used last, `hot.MAX_HOT` or so at most; it is no use of them.

        None if they cannot be told now. Waits for servers, scope by scope; it is for nobody who serves requests.
        """

    def load(self, blocks: Sequence[Block], views: Sequence[memoryview]) -> int:
        """Begin to load blocks into `views`; return the task's id."""

    def pop_stores(self) -> dict[int, StoreOutcome]:
        """Return, once, the stores answered since the last call."""

    def pop_found(self, task_id: int) -> bytes | None:
        """Return, once, a byte for each block of a lookup or load, 1 for a hit; None while it is under way."""

    def delete(self, blocks: Sequence[Block]) -> list[Key]:
        """Delete blocks and return the keys of those that were there."""

    def erase(self, keyspaces: Sequence[str], seen: Callable[[str, bytes], None]) -> ErasedTier | None:
        """Erase keyspaces from what is this pod's alone, and return what is left of them; None if nothing here is.

        `seen` is told the keyspace and the chunk's hash of each block that was there. It takes seconds at most, and
        goes on by itself.
        """

    def kept(self, blocks: Sequence[Block]) -> int | None:
        """Return how many of these blocks are there whatever the policy says; None where this pod cannot tell."""

    def state(self) -> TierState:
        """Return what the pod reports about this tier."""

    def policy_changed(self) -> None:
        """Put what another view changes for stored blocks through soon."""

    def usage(self) -> list[ScopeUsage]:
        """Return what scopes hold here, as far as this pod knows."""

    def by_scope(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counts that belong to scopes."""

    def latencies(self) -> Mapping[str, Histogram]:
        """Return how long LMCache waited for answers."""

    def ages(self) -> Mapping[str, Histogram]:
        """Return how old blocks were when they were loaded, and when they had to go."""

    def counters(self) -> dict[str, int]:
        """Return all counts."""

    @property
    def healthy(self) -> bool:
        """Whether all threads are alive. A tier that is away is no fault of this process."""

    def nodes(self) -> dict[str, str]:
        """Return the breaker's state of each place that the tier's blocks are in, by name, and what is wrong there."""

    def close(self) -> None:
        """Give up what is under way, answer every task, end the threads."""

"""Restore or recompute: which of a tier's hits a request loads, by the measured speeds of loads and prefill.

A lookup's hits are declined when loading them would take longer than computing them; the request then computes them as
if they were not there. Nothing is declined before both have been measured. A load that takes longer than expected is
given up (`patience_s`); the blocks that have arrived count.

A tier that is declined is tried again: now and then a request loads the first eighth of its hits. The pause between two
trials doubles up to LONGEST_PAUSE_S, until hits of that length are loaded again.

All figures are of one model in one pod, so bytes are proportional to tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstrata.contract.messages.adapter import PrefillCost, RestoreState
from kvstrata_sidecar.adapter.tier.interface import Block
from kvstrata_sidecar.adapter.tier.tasks import Restore, Task

DECLINE, ACCEPT = 1.0, 0.7
"""A load is declined if it takes longer than DECLINE times its prefill, until it takes less than ACCEPT times that."""

SHORT_S = 0.05
"""A load that takes less is never declined: it frees the engine, and shorter estimates are noise."""

OVERRUN_SHARE = 0.25
"""Part of its prefill that a load may take however fast it was expected to be: the price of a tier that has become
slow."""

SLOWER_WEIGHT = 0.5
"""Weight of a longer duration than expected, which may be an accident. A shorter one is proof."""

TRIAL_SHARE = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
RARE = 20
"""The pause is at least so many times the wait of a trial."""

GIVEN_UP_FACTOR = 8
"""A load that was given up with nothing is taken to need at least this many times its duration: it is declined next
time, even if it was given up after the least patience."""

UNDECIDED = Restore(tokens=0, began_s=0.0, within_s=float("inf"), prefill_s=0.0)
MAX_DECIDED = 256
"""Decisions kept until their loads begin; some never do."""

MOSTLY_WEIGHT, MOSTLY_ABOVE, MOSTLY_BELOW = 0.1, 0.6, 0.4
"""Weight of a decision in the declined share, and where that share begins and ceases to mean that most are declined."""


class Speed:
    """Seconds per token of loads, learned from their durations, for each power of two of tokens: the tokens of a load
    share its latency.

    A duration moves its own figure, and all others by the same factor (geometric, weighted), but only towards its own
    seconds per token, and not beyond: a tier that changes its speed does so for all lengths. A length without a figure
    has that of the nearest length. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._s_per_token: dict[int, float] = {}

    def add(self, tokens: int, seconds: float, weight: float = SLOWER_WEIGHT) -> None:
        """Learn a duration; `weight` counts if it is longer than expected."""
        length, sample = tokens.bit_length(), max(seconds, 1e-6) / tokens
        with self._lock:
            known = length in self._s_per_token
            factor = sample / (self._nearest(length) or sample)
            # A new length may be slower for each token because it is shorter.
            if known or factor < 1:
                factor **= weight if factor > 1 else 1.0
                for one, figure in self._s_per_token.items():
                    self._s_per_token[one] = sorted((figure, factor * figure, sample))[1]
            if not known:
                self._s_per_token[length] = sample

    def s_per_token(self, tokens: int) -> float | None:
        """Return the estimate for work on that many tokens, None before the first duration."""
        with self._lock:
            return self._nearest(tokens.bit_length())

    def _nearest(self, length: int) -> float | None:
        nearest = min(self._s_per_token, key=lambda one: (abs(one - length), one), default=None)
        return None if nearest is None else self._s_per_token[nearest]


class Prefill:
    """How long the engine's prefill takes; `costs` are the last that the gate sent."""

    def __init__(self) -> None:
        self.costs: Sequence[PrefillCost] = ()

    def s_per_token(self, tokens: int) -> float | None:
        """Return the estimate for a prompt of that many tokens, or of the nearest length with one; None without any."""
        length = (tokens - 1).bit_length()
        near = ((abs((one.tokens - 1).bit_length() - length), one.ns_per_token) for one in self.costs)
        nearest = min(near, default=None)
        return None if nearest is None else nearest[1] / 1e9

    def seconds(self, tokens: int, prompt_tokens: int) -> float | None:
        """Return how long it takes to compute the last `tokens` of a prompt's beginning of `prompt_tokens`. Each is
        taken as costly as the mean token of that beginning; later ones cost more, so it is too little rather than too
        much."""
        s_per_token = self.s_per_token(prompt_tokens)
        return None if s_per_token is None else s_per_token * tokens


def declines(load_s: float, prefill_s: float, *, declining: bool) -> bool:
    """Whether to compute rather than load. `declining`: the last decision for this length."""
    return load_s > SHORT_S and load_s > (ACCEPT if declining else DECLINE) * prefill_s


def patience_s(load_s: float | None, prefill_s: float) -> float:
    """Return how long to wait for a load that is expected to take `load_s` (None: unknown), at most its prefill."""
    return max(2 * SHORT_S, OVERRUN_SHARE * prefill_s, min(prefill_s, 2 * (load_s or 0.0)))


class Hits(NamedTuple):
    """Usable hits of one lookup: `numbers` of the blocks by chunk, in order; the chunks of the prompt's beginning that
    is there with them, and of its part from the first of them on."""

    numbers: Sequence[Sequence[int]]
    prompt_chunks: int
    gained_chunks: int


@dataclass(slots=True)
class _Length:
    """The last decision for prompts of one length, and its trials."""

    declining: bool = False
    trial_at_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S


@dataclass(eq=False)
class Restoring:
    """The decisions of one tier. `held` returns whether a faster tier has a block for the present request.
    Thread-safe."""

    _prefill: Prefill
    _chunk_tokens: Callable[[], int | None]
    _held: Callable[[Block], bool]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._speed = Speed()
        self._lengths: dict[int, _Length] = {}
        self._decided: dict[tuple[str, bytes], Restore] = {}
        self._restored = self._declined = self._given_up = 0
        self._saved_s = self._avoided_s = self._lost_s = 0.0
        self._tokens, self._bytes_per_s = 0, 0.0
        self._share = 0.0
        self.declining = False
        """Whether most hits of late were declined."""

    def worth(self, blocks: Sequence[Block], found: bytes) -> bytes:
        """Return a lookup's answer without the hits that are declined."""
        size = self._chunk_tokens()
        if size is None or 1 not in found:
            return found
        hits = usable(blocks, found, self._held)
        if not hits.numbers:
            return found
        tokens = size * len(hits.numbers)
        prefill_s = self._prefill.seconds(size * hits.gained_chunks, size * hits.prompt_chunks)
        load_s = self._load_s(tokens)
        if prefill_s is None:
            return found
        with self._lock:
            length = self._lengths.setdefault(tokens.bit_length(), _Length())
            length.declining = load_s is not None and declines(load_s, prefill_s, declining=length.declining)
            first = blocks[hits.numbers[0][0]]
            if not length.declining:
                length.pause_s = FIRST_PAUSE_S
                self._decide(first, Restore(tokens, 0.0, patience_s(load_s, prefill_s), prefill_s))
                self._note(0.0)
                return found
            self._note(1.0)
            self._declined += 1
            self._avoided_s += max(0.0, (load_s or 0.0) - prefill_s)
            now_s = self.clock()
            if now_s < length.trial_at_s:
                return bytes(len(found))
            tried = hits.numbers[: max(1, len(hits.numbers) // TRIAL_SHARE)]
            share_s = prefill_s * len(tried) / len(hits.numbers)
            length.trial_at_s = now_s + min(LONGEST_PAUSE_S, max(length.pause_s, RARE * share_s))
            length.pause_s = min(LONGEST_PAUSE_S, 2 * length.pause_s)
            self._decide(first, Restore(size * len(tried), 0.0, max(2 * SHORT_S, share_s), share_s))
        answer = bytearray(len(found))
        for numbers in tried:
            for number in numbers:
                answer[number] = 1
        return bytes(answer)

    def begin(self, blocks: Sequence[Block]) -> Restore | None:
        """Return how a load is measured and how long it may take; None for one that no request waits for."""
        size = self._chunk_tokens()
        if size is None or not blocks:
            return None
        tokens = size * len({block.chunk_hash for block in blocks})
        with self._lock:
            decided = self._decided.pop((blocks[0].keyspace, blocks[0].chunk_hash), UNDECIDED)
        return decided._replace(tokens=tokens, began_s=self.clock())

    def over(self, restore: Restore, task: Task) -> None:
        """Learn from a load that was answered. Misses and failures of the server are no measure of its speed."""
        took_s, part = self.clock() - restore.began_s, sum(task.found) / len(task.found)
        if task.cancelled:
            # At best the next block would have arrived just now.
            whole_s = took_s / min(1.0, part + 1 / len(task.found)) if part else GIVEN_UP_FACTOR * took_s
            if (self._load_s(restore.tokens) or 0.0) < whole_s:
                self._speed.add(restore.tokens, whole_s, weight=1.0)
        elif part and not task.failed_parts:
            self._speed.add(max(1, int(restore.tokens * part)), took_s)
        else:
            return
        with self._lock:
            self._tokens = restore.tokens
            if task.sizes:
                rate = sum(task.sizes) / max(took_s, 1e-6)
                self._bytes_per_s = (self._bytes_per_s + rate) / 2 if self._bytes_per_s else rate
            self._restored += not task.cancelled
            self._given_up += task.cancelled
            gain_s = restore.prefill_s * part - took_s
            if restore.prefill_s and gain_s > 0:
                self._saved_s += gain_s
            elif restore.prefill_s:
                self._lost_s -= gain_s

    def state(self) -> RestoreState | None:
        """Return the figures so far, None before the first load was measured."""
        load = self._speed.s_per_token(self._tokens)
        if load is None:
            return None
        prefill = self._prefill.s_per_token(self._tokens)
        with self._lock:
            return RestoreState(
                restored=self._restored,
                declined=self._declined,
                given_up=self._given_up,
                saved_ms=int(1000 * self._saved_s),
                avoided_ms=int(1000 * self._avoided_s),
                lost_ms=int(1000 * self._lost_s),
                bytes_per_s=int(self._bytes_per_s),
                tokens_per_s=int(1 / load),
                prefill_tokens_per_s=int(1 / prefill) if prefill else 0,
            )

    def _load_s(self, tokens: int) -> float | None:
        s_per_token = self._speed.s_per_token(tokens)
        return None if s_per_token is None else s_per_token * tokens

    def _decide(self, first: Block, restore: Restore) -> None:
        """Keep a decision for the load that follows. The caller holds the lock."""
        self._decided[first.keyspace, first.chunk_hash] = restore
        while len(self._decided) > MAX_DECIDED:
            del self._decided[next(iter(self._decided))]

    def _note(self, declined: float) -> None:
        self._share += MOSTLY_WEIGHT * (declined - self._share)
        self.declining = self._share > (MOSTLY_BELOW if self.declining else MOSTLY_ABOVE)


def usable(blocks: Sequence[Block], found: bytes, held: Callable[[Block], bool]) -> Hits:
    """Return the hits that LMCache can use: those within the longest beginning of the prompt of which every block is
    here or in a faster tier."""
    chunks: dict[bytes, list[int]] = {}
    for number, block in enumerate(blocks):
        chunks.setdefault(block.chunk_hash, []).append(number)
    loaded: list[list[int]] = []
    first = count = 0
    for numbers in chunks.values():
        missing = [number for number in numbers if not held(blocks[number])]
        if not all(found[number] for number in missing):
            break
        if missing:
            first = first if loaded else count
            loaded.append(missing)
        count += 1
    return Hits(loaded, count, count - first if loaded else 0)

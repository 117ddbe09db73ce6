"""Cost of prefill, measured from the engine's own metrics, and the prefill that hits avoided.

Each pair of pages gives the requests that finished between them, the seconds of their prefill (from the first
scheduling to the first token, so without queueing and without loading blocks), and the tokens that were computed. Their
mean length decides the bucket, because prefill's cost per token grows with length, and short ones consist of overhead.

vLLM's `prefix_cache_hits` counts a waiting request at each attempt to schedule it; `prompt_tokens_by_source` does not.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from kvstrata_sidecar.prometheus_text import family

LENGTHS: Final = tuple(256 << power for power in range(11))
"""Upper bounds of the buckets in computed tokens, inclusive; the last one also has all longer prompts."""

LEAST_TOKENS = 64
"""Shorter prefills measure an engine step's overhead, not the cost of a token."""

KEPT_PER_REQUEST = 0.9
"""Weight of former measurements after one more request: about the last ten count."""

LOCAL, EXTERNAL = "local_cache_hit", "external_kv_transfer"
"""Sources of prompt tokens that were not computed, in vLLM's words: its own cache, and the cache server."""

_REQUESTS = "request_prefill_time_seconds_count"
_SECONDS = "request_prefill_time_seconds_sum"
_COMPUTED = "request_prefill_kv_computed_tokens_sum"
_PROMPT = "request_prompt_tokens_sum"
_SAMPLES = re.compile(
    rf'^vllm:(?:({_REQUESTS}|{_SECONDS}|{_COMPUTED}|{_PROMPT})|prompt_tokens_by_source_total(?=.*"({LOCAL}|{EXTERNAL})"))'
    r"(?:\{.*\})? (\S+)$".encode(),
    re.MULTILINE,
)


@dataclass(slots=True)
class PrefillCost:
    """`avoided_s` has the seconds of prefill that cached prompt tokens would have taken, once a cost is known."""

    avoided_s: dict[str, float] = field(default_factory=lambda: {LOCAL: 0.0, EXTERNAL: 0.0})
    _measured: dict[int, tuple[float, float]] = field(default_factory=dict)  # seconds and tokens, by length
    _counted: dict[str, float] | None = None

    def observe(self, page: bytes) -> None:
        totals: dict[str, float] = {}
        for name, source, value in _SAMPLES.findall(page):
            key = (name or source).decode()
            totals[key] = totals.get(key, 0.0) + float(value)
        if _REQUESTS not in totals:
            return
        counted = self._counted
        if counted is None:
            # This gate may be younger than its engine, whose earlier hits an earlier gate counted.
            counted = {source: totals.get(source, 0.0) for source in self.avoided_s}
        elif any(totals.get(name, 0.0) < count for name, count in counted.items()):
            counted = {}  # the engine is new
        new = {name: total - counted.get(name, 0.0) for name, total in totals.items()}
        requests, computed = new[_REQUESTS], new.get(_COMPUTED, 0.0)
        if requests and computed / requests >= LEAST_TOKENS:
            length, kept = _bucket(computed / requests), KEPT_PER_REQUEST**requests
            seconds, tokens = self._measured.get(length, (0.0, 0.0))
            self._measured[length] = seconds * kept + new.get(_SECONDS, 0.0), tokens * kept + computed
        self._counted = totals
        per_token_s = self.seconds_per_token(new.get(_PROMPT, 0.0) / requests) if requests else None
        for source in self.avoided_s:
            if per_token_s is None:
                totals[source] = counted.get(source, 0.0)  # counts later
            else:
                self.avoided_s[source] += new.get(source, 0.0) * per_token_s

    def page(self) -> bytes:
        costs = [({"tokens": str(length)}, f"{seconds:.4g}") for length, seconds in self.by_length().items()]
        avoided = [({"source": source}, f"{seconds:.6f}") for source, seconds in self.avoided_s.items()]
        text = "Measured cost of prefill, by length (up to so many computed tokens)."
        lines = [*family("kvstrata_gate_prefill_seconds_per_token", "gauge", text, costs)]
        text = "Prefill that cached prompt tokens would have taken, by their source."
        lines += family("kvstrata_gate_prefill_avoided_seconds_total", "counter", text, avoided)
        return "".join(f"{line}\n" for line in lines).encode()

    def by_length(self) -> dict[int, float]:
        """Return the measured seconds per token, by the upper bound of a bucket of `LENGTHS`."""
        return {length: seconds / tokens for length, (seconds, tokens) in sorted(self._measured.items())}

    def seconds_per_token(self, tokens: float) -> float | None:
        """Return the seconds per token of a prefill of so many tokens; None if there is no measurement.

        Without one of this length, the smaller of the next shorter and the next longer one: neither the overhead of
        short prefills nor the attention of long ones is added."""
        length, known = _bucket(tokens), self.by_length()
        beside = {*[one for one in known if one <= length][-1:], *[one for one in known if one >= length][:1]}
        chosen = {length} if length in beside else beside
        return min((known[one] for one in chosen), default=None)


def _bucket(tokens: float) -> int:
    return LENGTHS[min(bisect_left(LENGTHS, tokens), len(LENGTHS) - 1)]

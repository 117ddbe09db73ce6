"""Rate limits of tenants on this replica: token buckets of requests and of tokens.

A bucket holds a minute's worth and is refilled evenly. A request is charged when it is sent to the engine, as often as
it has sequences; its tokens are charged when its answer has ended. So a bucket may fall below zero; the tenant then
waits until there is some again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstrata.contract.policy.rate import RateLimit
from kvstrata_sidecar.gate.http.errors import Reason, Refusal

_BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class Bucket:
    """The amount charged and not refilled yet. The limit is passed in, so that a changed one applies at once."""

    charged: float = 0.0
    at_s: float = 0.0

    def left(self, per_minute: int, now_s: float) -> float:
        refilled = (now_s - self.at_s) * per_minute / 60
        self.charged, self.at_s = max(0.0, self.charged - refilled), now_s
        return per_minute - self.charged


class Rates:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def check(self, tenant: str, limit: RateLimit) -> None:
        """Raise Refusal (429) if the tenant has no request or no token left."""
        for name, bucket, per_minute in self._limited(tenant, limit):
            left = bucket.left(per_minute, self._clock())
            if left < 1:
                wait_s = math.ceil((1 - left) * 60 / per_minute)
                raise Refusal(
                    429, Reason.RATE_LIMIT_EXCEEDED,
                    f"the limit of this tenant on this replica is {per_minute} {name} a minute: wait {wait_s} s",
                    retry_after_s=wait_s, extra=self.headers(tenant, limit),
                )  # fmt: skip

    def charge(self, tenant: str, limit: RateLimit, *, requests: int = 0, tokens: int = 0) -> None:
        amounts = {"requests": requests, "tokens": tokens}
        for name, bucket, per_minute in self._limited(tenant, limit):
            bucket.left(per_minute, self._clock())
            bucket.charged += amounts[name]

    def headers(self, tenant: str, limit: RateLimit) -> bytes:
        """Return the lines of a response's head, as OpenAI names them; resets are the time until a bucket is full."""
        lines = b""
        for name, bucket, per_minute in self._limited(tenant, limit):
            left = bucket.left(per_minute, self._clock())
            reset_s = math.ceil(bucket.charged * 60 / per_minute)
            remaining = max(0, math.floor(left))
            for part, value in (("limit", per_minute), ("remaining", remaining), ("reset", f"{reset_s}s")):
                lines += f"x-ratelimit-{part}-{name}: {value}\r\n".encode()
        return lines

    def _limited(self, tenant: str, limit: RateLimit) -> Iterator[tuple[str, Bucket, int]]:
        """Yield name, bucket and limit of each limit in force, and reset the buckets of the others."""
        for name, per_minute in (("requests", limit.requests_per_minute), ("tokens", limit.tokens_per_minute)):
            if per_minute is None:
                self._buckets.pop((tenant, name), None)
            else:
                yield name, self._buckets.setdefault((tenant, name), Bucket()), per_minute


def estimated_tokens(request_bytes: int, events: int) -> int:
    """Estimate the tokens of an answer without usage: most events of a stream hold one token."""
    return request_bytes // _BYTES_PER_TOKEN + events

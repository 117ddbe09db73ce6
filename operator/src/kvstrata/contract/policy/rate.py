"""Rate limits of a tenant, as each replica's gate enforces them."""

from __future__ import annotations

from typing import Annotated

from kvstrata.contract.wire import Range, wired

MAX_PER_MINUTE = 10**12
PerMinute = Annotated[int, Range(1, MAX_PER_MINUTE)]


@wired("a rate limit", camel=True, omit=("requests_per_minute", "tokens_per_minute"))
class RateLimit:
    """Limits of one tenant on one replica. None: there is no such limit, or that of the model's rules applies."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None

    def or_default(self, default: RateLimit) -> RateLimit:
        """Return the limits in force: each that is not set is taken from `default`."""
        return RateLimit(
            self.requests_per_minute or default.requests_per_minute, self.tokens_per_minute or default.tokens_per_minute
        )


UNLIMITED = RateLimit()

"""Worth of sharing: the same conversations without reuse, with today's means, and with kvstrata, on real engines."""

from bench.result import Result


async def measure() -> Result:
    """Measure missing runs for an hour at most."""
    from bench.benefit.compare import measure

    return await measure()

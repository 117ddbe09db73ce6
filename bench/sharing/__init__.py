"""Stored and computed blocks of tenants with a shared prefix by way of sharing, beside the arithmetic optimum."""

from bench.result import Result


async def measure() -> Result:
    """Measure all of it."""
    from bench.sharing.compare import measure

    return await measure()

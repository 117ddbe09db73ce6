"""Cost of the policy adapter beside LMCache's own Redis client, through the interface by which LMCache uses both.

On a cluster with TLS, which that client cannot use, it is compared with Valkey GLIDE, the client of LMCache's `valkey`
adapter.
"""

from bench.result import Result


async def measure() -> Result:
    """Measure all of it."""
    # The measured processes are modules of this package, too; their interpreters lack the comparison's imports.
    from bench.adapter.compare import measure

    return await measure()

"""Throughput of the file tier on a disk, beside fio as the limit and LMCache's own adapter for files as the peer."""

from bench.result import Result


async def measure() -> Result:
    """Measure all of it."""
    # The measured process is a module of this package, too; its interpreter lacks the comparison's imports.
    from bench.files.compare import measure

    return await measure()

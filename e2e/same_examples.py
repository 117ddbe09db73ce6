"""A pytest plugin for CI: property tests draw the same examples in every run, so that a failure is the change's.

Without it, tests draw new examples in each run; an example that failed then is pinned beside its test.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same examples", derandomize=True)
settings.load_profile("same examples")

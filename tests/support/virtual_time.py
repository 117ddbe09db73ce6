"""An event loop whose clock jumps to the next timer when nothing is to do: hours pass in no time, and a machine that
has other work changes nothing. For code that waits for nothing but timers and other tasks.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class _Jump(selectors.DefaultSelector):
    """Waits for nothing; `passed_s` is the sum of the timeouts that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout is not None else None)
        if not found and timeout is not None:
            self.passed_s += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Its `time` begins at 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds that would have passed."""
        return self._jump.passed_s


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in such a loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run

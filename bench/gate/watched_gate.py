"""The gate's program, with a watch on its event loop.

SIGUSR1 starts the watch. From then on each pause of the loop that is longer than all before it is a line of the
standard output, `{"loop_pause_ms": 1.5}`: CPU time of the loop's thread, so other load of the machine does not count.
"""

from __future__ import annotations

import json
import signal
import time

from kvstrata_sidecar.gate import main as program

_TICK_S = 0.002


class _WatchedGate(program.Gate):
    async def run(self) -> None:
        self.loop.add_signal_handler(signal.SIGUSR1, self._watch)
        await super().run()

    def _watch(self) -> None:
        longest_s = 0.0
        due_s, used_s = 0.0, 0.0

        def tick() -> None:
            nonlocal longest_s
            # A tick that is late by less than the CPU time since the last one also waited for other processes.
            pause_s = min(self.loop.time() - due_s, time.thread_time() - used_s)
            if pause_s > longest_s:
                longest_s = pause_s
                print(json.dumps({"loop_pause_ms": round(pause_s * 1000, 3)}), flush=True)
            plan()

        def plan() -> None:
            nonlocal due_s, used_s
            due_s, used_s = self.loop.time() + _TICK_S, time.thread_time()
            self.loop.call_at(due_s, tick)

        plan()


if __name__ == "__main__":
    program.Gate = _WatchedGate  # type: ignore[misc]
    program.main()

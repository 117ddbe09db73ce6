"""Streamed completions that are read while something else happens."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .calls import Replica
from .kubectl import LIMIT_S


@dataclass(slots=True)
class Stream:
    """A streamed completion; of several sequences the text of the first.

    Times are monotonic seconds, `problem` is the last error of the gate or the connection.
    """

    arrived: list[float] = field(default_factory=list)
    text: str = ""
    done: bool = False
    problem: str = ""
    ended_at: float | None = None

    @property
    def tokens(self) -> int:
        """How many tokens arrived, of a text of the words of `prompts.py`."""
        return len(self.text.split())

    def read(self, lines: Iterator[bytes]) -> None:
        """Take the lines of an answer as they come, to its end."""
        try:
            for line in lines:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    self.done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    self.problem = str(event["error"].get("message"))
                    continue
                self.arrived.append(time.monotonic())
                self.text += "".join(choice["text"] for choice in event["choices"] if choice["index"] == 0)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        finally:
            self.ended_at = time.monotonic()


@contextmanager
def streaming(where: Replica, key: str, body: dict[str, Any]) -> Iterator[Stream]:
    """Stream a completion beside the block, which starts when the first token has come; the end hangs up."""
    stream = Stream()
    lines = where.stream("/v1/completions", json.dumps({**body, "stream": True}).encode(), key)
    thread = threading.Thread(target=stream.read, args=(lines,), daemon=True)
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while not stream.arrived and stream.ended_at is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stream.arrived, f"no token came: {stream.problem or 'no answer'}"
    yield stream
    thread.join(LIMIT_S)

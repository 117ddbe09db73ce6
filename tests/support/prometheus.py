"""Answers that Prometheus gave, over HTTP. It stands in for a Prometheus, which would need hours of data."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

ANSWERS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Answers of Prometheus 2.42 about two gates, by kind and query: six minutes between two values."""

END_S = 1_795_780_800
"""The moment of the recorded questions, which were about two hours."""

SELECTED = ("--since", "2h", "--selector", 'namespace!="other"')


@dataclass(slots=True)
class Replay:
    """Questions that were asked, and the token that they need; other questions have empty answers."""

    url: str = ""
    token: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        address = urlsplit(path)
        fields = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.asked.append(fields)
        if self.token and authorization != f"Bearer {self.token}":
            return 401, b""
        kind = address.path.removeprefix("/api/v1/")
        result = ANSWERS.get(f"{kind} {fields['query']}", [])
        return 200, json.dumps({"status": "success", "data": {"result": result}}).encode()


@contextmanager
def replayed() -> Iterator[Replay]:
    """Serve the answers on a free port."""
    replay = Replay()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = replay.answer(self.path, self.headers["Authorization"])
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        replay.url = f"http://127.0.0.1:{server.server_port}"
        yield replay
        server.shutdown()

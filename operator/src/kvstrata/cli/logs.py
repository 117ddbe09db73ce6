"""Logs on standard error, and the audit log on standard output: one JSON object a line.

A separate thread writes the audit log, so that callers never wait. When its queue is full, events are dropped and
counted; the next line reports their number.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from queue import Full, Queue

from pythonjsonlogger.json import JsonFormatter

from kvstrata.contract.messages.audit import LOGGER, Action, Emitter, Happened, Source
from kvstrata.reconcile import metrics

MAX_WAITING = 10_000
"""Queued audit events, a few megabytes."""

FLUSH_WITHIN_S = 1.0


class AuditHandler(logging.Handler):
    """Writes the `audit` attribute of log records. `write` takes a whole line and may block or raise OSError."""

    def __init__(self, emitter: Emitter, write: Callable[[bytes], None], most: int = MAX_WAITING) -> None:
        super().__init__()
        self._emitter, self._write = emitter, write
        self._waiting: Queue[tuple[float, Happened] | threading.Event] = Queue(most)
        self._counting = threading.Lock()
        self._dropped = 0
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        happened = getattr(record, "audit", None)
        if not isinstance(happened, Happened):
            return
        try:
            self._waiting.put_nowait((record.created, happened))
        except Full:
            self._drop()

    def flush(self) -> None:
        written = threading.Event()
        try:
            self._waiting.put(written, timeout=FLUSH_WITHIN_S)
        except Full:
            return
        written.wait(FLUSH_WITHIN_S)

    def _drop(self, count: int = 1) -> None:
        metrics.AUDIT_DROPPED.inc(count)
        with self._counting:
            self._dropped += count

    def _run(self) -> None:
        while True:
            taken = self._waiting.get()
            if isinstance(taken, threading.Event):
                taken.set()
                continue
            at_s, happened = taken
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            try:
                if dropped:
                    self._line(at_s, Happened(action=Action.EVENTS_DROPPED, count=dropped))
                    dropped = 0
                self._line(at_s, happened)
            except Exception:
                self._drop()
                with self._counting:
                    self._dropped += dropped

    def _line(self, at_s: float, happened: Happened) -> None:
        self._sequence += 1
        self._write(self._emitter.line(self._sequence, at_s, happened))


def write_whole(data: bytes) -> None:
    """Write to standard output unbuffered: a blocked thread must not hold up the end of the process."""
    while data:
        data = data[os.write(1, data) :]


def configure_audit(pod: str) -> None:
    log = logging.getLogger(LOGGER)
    log.handlers = [AuditHandler(Emitter(Source.OPERATOR, pod, secrets.token_hex(8)), write_whole)]
    log.setLevel(logging.INFO)
    log.propagate = False


def configure(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    renamed = {"levelname": "level", "name": "logger", "exc_info": "exception"}
    handler.setFormatter(JsonFormatter(["levelname", "name", "message"], rename_fields=renamed, timestamp="time"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvstrata").setLevel(level)
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)

"""Panels from a Prometheus server, by its HTTP API."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvstrata.cli.report.panels import Panel, Part, Question, Series, fewer
from kvstrata.cli.text import CommandError

TIMEOUT_S = 60
POINTS = 120
LEAST_STEP_S = 60
SCRAPES = 4
"""A rate is taken over so many steps at least, so that it has several scrapes of a usual interval."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """`matchers` select series, as inside of PromQL's braces."""

    url: str
    since_s: int
    end_s: float
    matchers: str = ""
    token: str = ""

    @property
    def step_s(self) -> int:
        return max(LEAST_STEP_S, self.since_s // POINTS)

    def panel(self, question: Question) -> Panel:
        """Raises CommandError."""
        series: list[Series] = []
        totals: list[float] = []
        without: list[str] = []
        window_s = max(self.step_s, SCRAPES * LEAST_STEP_S)
        for part in question.parts:
            found = [
                Series(part.label(row["metric"]), points)
                for row in self._ask("query_range", self._query(question, part, f"{window_s}s"))
                if (points := [(float(at_s), float(value)) for at_s, value in row["values"] if isfinite(float(value))])
            ]
            series += found
            without += [] if found else [part.metric]
            total = self._ask("query", self._query(question, part, f"{self.since_s}s", summed=True))
            totals += [value for row in total if isfinite(value := float(row["value"][1]))]
        absent = f"Prometheus has no {' or '.join(without)} in this time" if without else ""
        return Panel(question, sum(totals) if totals else None, fewer(series, question), absent)

    def _query(self, question: Question, part: Part, window: str, *, summed: bool = False) -> str:
        labels = ", ".join(part.labels)
        by = "" if summed else f" by ({labels})"
        where = ",".join([*(f'{name}="{value}"' for name, value in part.where), *filter(None, [self.matchers])])
        if question.gauge:
            now = f"{part.metric}{{{where}}}"
            return f"sum{by} ({f'max by ({labels}) ({now})' if part.largest else now})"

        def grown(metric: str) -> str:
            return f"sum{by} ({'increase' if summed else 'rate'}({metric}{{{where}}}[{window}]))"

        return f"{grown(part.metric)} / ({grown(part.weight)} > 0)" if part.weight else grown(part.metric)

    def _ask(self, kind: str, query: str) -> list[Any]:
        times = {"time": self.end_s}
        if kind == "query_range":
            times = {"start": self.end_s - self.since_s, "end": self.end_s, "step": self.step_s}
        url = f"{self.url.rstrip('/')}/api/v1/{kind}?{urllib.parse.urlencode({'query': query} | times)}"
        request = urllib.request.Request(url)  # noqa: S310  (the command line takes http and https only)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                result = json.loads(answer.read())["data"]["result"]
            if not isinstance(result, list):
                raise TypeError
            return result
        except urllib.error.HTTPError as error:
            raise CommandError(f"Prometheus at {self.url} refuses a query ({error.code}): check --prometheus") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise CommandError(f"Prometheus at {self.url} does not answer, check --prometheus: {reason}") from None
        except (ValueError, KeyError, TypeError):
            raise CommandError(f"{self.url} answers as no Prometheus does: check --prometheus") from None

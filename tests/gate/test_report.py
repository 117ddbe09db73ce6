"""`kubectl kvstrata report` of a real gate's page, as a browser shows it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstrata.cli import plugin
from kvstrata.cli.report.page import DARK, LIGHT
from tests.support import fake_kubectl
from tests.support.browser import HEIGHT, WIDTH, colours, needs_chromium
from tests.support.prometheus import END_S, SELECTED, replayed

from .world import GLOBEX, World, chat, post

POD = {"metadata": {"name": "tiny-0", "namespace": "ns"}, "status": {"phase": "Running"}}
CLUSTER = {
    "get pods": {"items": [POD]},
    "get tenantcachepolicies.kvstrata.io": {"items": []},
    "get cacheinvalidations.kvstrata.io": {"items": []},
}
PAGE = "get --raw /api/v1/namespaces/ns/pods/tiny-0:8081/proxy/metrics"
PAGES = {False: "#ffffff", True: "#15181c"}
"""Background by the reader's preference for dark pages."""


async def test_the_hit_rate_of_a_gate_is_in_the_report(
    gate: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ({}, {}, {"key": GLOBEX}):
        assert (await gate.ask(post("/v1/chat/completions", chat(), **key))).status == 200
    page = (await gate.get("/metrics")).body.decode()
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER | {PAGE: page})
    assert plugin.main(["report", "--to", str(tmp_path / "report.html")]) == 0
    report = (tmp_path / "report.html").read_text()
    # The engine reports 4 of 7 tokens of each prompt as cached.
    assert report.count("57.1 %") == 1 + 2 * 2
    assert ">acme<" in report
    assert ">globex<" in report


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_plots_in_colours_that_the_reader_prefers(
    dark: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER)
    monkeypatch.setattr(time, "time", lambda: float(END_S))
    target = tmp_path / "report.html"
    with replayed() as prometheus:
        assert plugin.main(["report", "--prometheus", prometheus.url, *SELECTED, "--to", str(target)]) == 0
    seen = colours(target, tmp_path / "report.png", dark=dark)
    shown, other = (DARK, LIGHT) if dark else (LIGHT, DARK)
    assert seen[PAGES[dark]] > WIDTH * HEIGHT / 20
    assert PAGES[not dark] not in seen or seen[PAGES[not dark]] < WIDTH
    # Three tenants have lines of two pixels across the plot, with dashes.
    assert all(seen[colour] > 100 for colour in shown[:3])
    assert not any(seen[colour] for colour in other[:3])

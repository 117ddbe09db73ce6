"""`kubectl kvstrata report`: figures of pods and of Prometheus, everything escaped, and no zero for what is absent."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvstrata.cli import plugin
from kvstrata.cli.pages import parse
from kvstrata.cli.report import command
from kvstrata.cli.report.html import element
from kvstrata.cli.report.panels import ERASURES, QUESTIONS, Question, Series, fewer, from_pages
from kvstrata.cli.report.plots import amount
from kvstrata.contract.messages.adapter import AdapterState, ScopeUsage
from kvstrata_sidecar.adapter import metrics as cache_metrics
from kvstrata_sidecar.gate.metrics import Metrics
from kvstrata_sidecar.gate.prefill import PrefillCost
from tests.support import fake_kubectl
from tests.support.fake_kubectl import Refused
from tests.support.prometheus import END_S, SELECTED, Replay, replayed

REPOSITORY = Path(__file__).resolve().parents[3]
EVIL = '<script>alert("1")</script>'


def report(*arguments: str) -> int:
    return plugin.main(["report", *arguments])


def question(key: str) -> Question:
    return next(one for one in QUESTIONS if one.key == key)


def gate_page(prompt: int, cached: int, tenant: str = "acme") -> str:
    """The page of a gate, of the product's own classes."""
    metrics = Metrics(max_tenants=10)
    metrics.tenant(tenant).tokens(prompt, 1, cached)
    metrics.usage = [ScopeUsage("3f9a01bc22de", "cpu", 1 << 20, 4)]
    prefill = PrefillCost()
    for seconds, hits in ((1.0, 0), (2.0, 500)):
        prefill.observe(
            f"vllm:request_prefill_time_seconds_count{{}} {seconds}\n"
            f"vllm:request_prefill_time_seconds_sum{{}} {seconds}\n"
            f"vllm:request_prefill_kv_computed_tokens_sum{{}} {seconds * 1000}\n"
            f"vllm:request_prompt_tokens_sum{{}} {seconds * 1000}\n"
            f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {hits}\n'.encode()
        )
    whole = metrics.page() + prefill.page()
    return whole.decode() + cache_metrics.page(AdapterState("boot", 1, 1, True, 0), [], None)


def tiers_page(**bytes_by_scope: int) -> str:
    return "".join(
        f'kvstrata_cache_tier_used_bytes{{tier="shared",scope="{scope}"}} {used}\n'
        for scope, used in bytes_by_scope.items()
    )


def test_the_hit_rate_weighs_pods_and_tenants_by_their_tokens() -> None:
    read = [parse("a", gate_page(1000, 900)), parse("b", gate_page(3000, 300)), parse("c", gate_page(1000, 0, EVIL))]
    panel = from_pages(question("hits"), read)
    assert panel.total == pytest.approx(1200 / 5000)
    assert {one.label: one.last for one in panel.series} == {"acme": pytest.approx(0.3), EVIL: 0.0}


def test_prefill_saved_is_that_of_the_gates() -> None:
    panel = from_pages(question("saved"), [parse("a", gate_page(1, 1))] * 2)
    # 500 tokens at a second for a thousand, of each gate.
    assert panel.total == pytest.approx(1.0)
    assert panel.missing == ""


def test_pods_report_the_same_bytes_of_a_shared_tier_and_their_own_of_memory() -> None:
    read = [parse("a", tiers_page(x=100, y=5) + gate_page(1, 1)), parse("b", tiers_page(x=90) + gate_page(1, 1))]
    panel = from_pages(question("bytes"), read)
    assert {one.label: one.last for one in panel.series} == {
        "shared · x": 100,
        "shared · y": 5,
        "memory cpu · 3f9a01bc22de": 2 << 20,
    }


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked.key)
def test_absent_metrics_are_not_available_and_never_zero(asked: Question) -> None:
    for read in ([], [parse("a", "up 1\n")]):
        panel = from_pages(asked, read)
        assert (panel.total, panel.series) == (None, ())
        assert panel.missing


def test_a_metric_that_one_half_of_a_panel_lacks_is_named() -> None:
    panel = from_pages(question("bytes"), [parse("a", tiers_page(x=100))])
    assert panel.total == 100
    assert panel.missing == "no pod has kvstrata_gate_memory_used_bytes"


def test_a_gate_without_prompts_has_no_hit_rate() -> None:
    panel = from_pages(question("hits"), [parse("a", Metrics(max_tenants=1).page().decode())])
    assert (panel.total, panel.series, panel.missing) == (None, (), "pods counted nothing since their start")


def test_many_series_are_added_up_except_shares() -> None:
    many = [Series(f"{number:02}", ((0, number), (60, number))) for number in range(20)]
    kept = fewer(many, question("bytes"))
    assert [one.label for one in kept] == [*(f"{number:02}" for number in range(19, 11, -1)), "all others (12)"]
    assert list(kept[-1].points) == [(0, sum(range(12))), (60, sum(range(12)))]
    assert len(fewer(many, question("hits"))) == 8


def test_a_page_is_read_with_its_escapes_and_without_infinities() -> None:
    page = parse("a", '# TYPE m gauge\nm{a="x\\"}\\\\ \\n",b=""} 1.5e3\nm{a="y"} NaN\nn 2 1700000000\nnonsense\n')
    assert [(one.labels, one.value) for one in page.samples["m"]] == [({"a": 'x"}\\ \n', "b": ""}, 1500.0)]
    assert page.samples["n"][0].value == 2


def test_amounts_have_units_for_people() -> None:
    shown = [
        amount(*one) for one in ((0.5216, "%"), (805 * 2**20, "bytes"), (0.002, "s"), (7300, "s"), (2683.4, "blocks"))
    ]
    assert shown == ["52.2 %", "805 MiB", "2 ms", "2.03 h", "2,683 blocks"]
    assert amount(0, "bytes") == "0 bytes"


def test_texts_and_attributes_are_escaped() -> None:
    assert element("p", EVIL, element("b", "<"), title='"&') == (
        '<p title="&quot;&amp;">&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;<b>&lt;</b></p>'
    )


POLICY = {
    "metadata": {"name": "evil"},
    "spec": {"tenant": EVIL},
    "status": {"usage": {"observedAt": EVIL, "tiers": [{"tier": "shared", "used": "3Mi", "limit": EVIL}]}},
}
INVALIDATION = {
    "metadata": {"name": EVIL, "creationTimestamp": "2026-11-27T10:00:00Z"},
    "spec": {"mode": "Eager"},
    "status": {"phase": "Complete", "scopeSummary": EVIL, "keys": 7, "bytes": "2Mi", "receiptDigest": "ab" * 32},
}
POD = {"metadata": {"name": "chat-0", "namespace": "team"}, "status": {"phase": "Running"}}
CLUSTER: dict[str, Any] = {
    "get pods": {"items": [POD, {"metadata": {"name": "chat-1", "namespace": "team"}, "status": {"phase": "Running"}}]},
    "get --raw /api/v1/namespaces/team/pods/chat-0:8081/proxy/metrics": gate_page(1000, 600, EVIL),
    "get --raw /api/v1/namespaces/team/pods/chat-1:8081/proxy/metrics": Refused("chat-1 is gone"),
    "get tenantcachepolicies.kvstrata.io": {"items": [POLICY]},
    "get cacheinvalidations.kvstrata.io": {"items": [INVALIDATION]},
}


class Elements(HTMLParser):
    """Elements and their attributes, and the text outside of style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open and self.open[-1] == "style" else f"{data}\n"


def check_page(page: str) -> Elements:
    """A page loads nothing, runs nothing, and has names for its plots."""
    read = Elements(page)
    assert read.open == []
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in read.found)
    attributes = {name for _, found in read.found for name in found}
    assert attributes.isdisjoint({"src", "href", "style"})
    assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|javascript:", page)
    plots = [found for tag, found in read.found if tag == "svg" and found.get("role") == "img"]
    names = {found.get("id") for tag, found in read.found if tag == "title"}
    assert {found["aria-labelledby"] for found in plots} <= names
    return read


def test_a_report_of_pods_escapes_everything_and_names_the_pod_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER)
    target = tmp_path / "out.html"
    assert report("--to", str(target)) == 0
    assert capsys.readouterr().out == f"{target}\n"
    read = check_page(target.read_text())
    assert "60 %" in read.text
    assert read.text.count(EVIL) >= 6
    assert "1 of 2 answered" in read.text
    assert "Not in this report: pod chat-1: chat-1 is gone" in read.text
    assert "abababababababab\n" in read.text


def test_objects_that_cannot_be_read_are_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "get tenantcachepolicies.kvstrata.io"
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER | {kind: Refused("policies are forbidden")})
    assert report("--to", str(tmp_path / "out.html")) == 0
    assert "Not available: policies are forbidden." in check_page((tmp_path / "out.html").read_text()).text


@pytest.fixture
def prometheus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    monkeypatch.setattr(command.time, "time", lambda: float(END_S))
    with replayed() as replay:
        yield replay


def test_a_report_of_prometheus_has_lines_over_time_and_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prometheus: Replay
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER)
    target = tmp_path / "out.html"
    assert report("--prometheus", prometheus.url, *SELECTED, "--to", str(target)) == 0
    read = check_page(target.read_text())
    for total in ("62.5 %", "399 s", "805 MiB", "1,075 blocks", "7 erasures"):
        assert total in read.text
    assert "Not available" not in read.text
    paths = [found for tag, found in read.found if tag == "path"]
    assert len(paths) == 3 + 2 + 6 + 4 + 2
    assert {fields["step"] for fields in prometheus.asked if "step" in fields} == {"60"}
    assert {fields["start"] for fields in prometheus.asked if "start" in fields} == {str(float(END_S - 7200))}


def test_an_empty_prometheus_has_nothing_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prometheus: Replay
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, {"get": Refused("The connection was refused")})
    target = tmp_path / "out.html"
    assert report("--prometheus", prometheus.url, "--namespace", "team", "--to", str(target)) == 0
    text = check_page(target.read_text()).text
    assert text.count("Not available: Prometheus has no ") == len((*QUESTIONS, ERASURES))
    assert text.count("Not available: no cluster answers") == 2
    assert all('namespace="team"' in fields["query"] for fields in prometheus.asked)


def test_a_token_is_sent_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prometheus: Replay) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER)
    prometheus.token = "secret"
    (tmp_path / "token").write_text("secret\n")
    arguments = ("--prometheus", prometheus.url, "--to", str(tmp_path / "out.html"))
    assert report(*arguments, "--token-file", str(tmp_path / "token")) == 0
    assert report(*arguments) == 1


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert report(*arguments) == 1
    reported = capsys.readouterr()
    assert (reported.out, reported.err.count("\n")) == ("", 1)
    return reported.err


def test_each_failure_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prometheus: Replay
) -> None:
    fake_kubectl.put(tmp_path, monkeypatch, {"get": Refused("The connection to the server was refused")})
    assert "no cluster answers, name one with --context or --kubeconfig" in refused(capsys)
    fake_kubectl.put(tmp_path, monkeypatch, CLUSTER)
    assert "cannot be used, name another file" in refused(capsys, "--to", str(tmp_path / "no/folder.html"))
    assert "does not answer, check --prometheus" in refused(capsys, "--prometheus", "http://127.0.0.1:1")
    token = ("--token-file", str(tmp_path / "absent"))
    assert "absent cannot be used" in refused(capsys, "--prometheus", prometheus.url, *token)
    prometheus.token = "secret"
    assert "refuses a query (401)" in refused(capsys, "--prometheus", prometheus.url)
    nothing: dict[str, Any] = CLUSTER | {
        "get pods": {"items": []},
        "get cachedomains": {"items": [{"kind": "CacheDomain"}]},
    }
    fake_kubectl.put(tmp_path, monkeypatch, nothing)
    assert refused(capsys) == "no operator serves the namespace: add it to watchNamespaces of a release\n"
    claimed = {"kind": "CacheDomain", "status": {"servedBy": {"uid": "u"}}}
    fake_kubectl.put(tmp_path, monkeypatch, nothing | {"get cachedomains": {"items": [claimed]}})
    assert "no pod runs" in refused(capsys)


@pytest.mark.parametrize(
    "arguments",
    [("--since", "5m"), ("--since", "forever"), ("--prometheus", "file:///etc/passwd"), ("--prometheus", "p:9090")],
)
def test_a_wrong_option_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report(*arguments)
    assert "must be a" in capsys.readouterr().err


def test_every_option_is_in_the_reference() -> None:
    parser = argparse.ArgumentParser()
    command.add_to(parser)
    options = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    page = (REPOSITORY / "docs/reference/plugin.md").read_text()
    assert {name for name in options if f"`{name}`" not in page} == set()

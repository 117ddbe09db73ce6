"""The gate's audit log: what became of requests, for whom and why; nobody who is served waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvstrata.contract.messages.audit import Action, Emitter, Line, Source
from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.policy.data_key import DataKey
from kvstrata_sidecar.gate.audit import SERVED_EVERY_S, Audit
from tests.support.audit import read_line

from .world import GLOBEX, NOBODY, World, chat, entry, keyspace, post, until

TELLER = Emitter(Source.GATE, "pod-1", "b007")
WAIT_S = 60.0


class Taker:
    """Takes lines, unless told to wait or to fail; and a clock that is set by hand."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.open = threading.Event()
        self.open.set()
        self.stuck = threading.Event()
        self.broken = False
        self.now_s = 1000.0

    def write(self, data: bytes) -> None:
        """Take a line."""
        if not self.open.is_set():
            self.stuck.set()
            assert self.open.wait(WAIT_S)
        if self.broken:
            raise BrokenPipeError
        line = read_line(data)
        assert Source.GATE in line.action.sources
        self.lines.append(line)

    def audit(self, most_rows: int = 3) -> Audit:
        """Return an audit log whose lines are taken here."""
        return Audit(
            TELLER, namespace="team", model="tiny", write=self.write, now=lambda: self.now_s, most_rows=most_rows
        )


@pytest.fixture
def taker() -> Iterator[Taker]:
    made = Taker()
    yield made
    made.open.set()


def written(audit: Audit) -> None:
    """Wait until what was handed over is written."""
    until_s = time.monotonic() + WAIT_S
    while not audit._idle and time.monotonic() < until_s:
        time.sleep(0.002)
    assert audit._idle


def hand_over(audit: Audit, *, last: bool = True) -> None:
    """Have what happened written. The gate's own turn may have begun just before; then this one waits for it."""
    written(audit)
    audit.turn(last=last)
    written(audit)


def end(audit: Audit) -> None:
    """End an audit log, and wait for its last lines for as long as it takes."""
    audit.close()
    written(audit)


def shown(lines: list[Line]) -> list[tuple[Action, str | None, str | None, int | None]]:
    return [(line.action, line.reason, line.scope, line.count) for line in lines]


def test_requests_with_one_fate_are_one_line_with_their_number(taker: Taker) -> None:
    audit = taker.audit()
    for _ in range(5):
        audit.request(Action.REQUESTS_REFUSED, "model", "c0ffee00c0ff")
    audit.request(Action.REQUESTS_REFUSED, "unauthenticated")
    taker.now_s += 1
    audit.turn()
    end(audit)
    assert shown(taker.lines) == [
        (Action.REQUESTS_REFUSED, "model", "c0ffee00c0ff", 5),
        (Action.REQUESTS_REFUSED, "unauthenticated", "_none", 1),
    ]
    assert {(line.since, line.time) for line in taker.lines} == {
        ("1970-01-01T00:16:40.000Z", "1970-01-01T00:16:41.000Z")
    }
    assert {(line.namespace, line.model) for line in taker.lines} == {("team", "tiny")}


def test_a_line_has_the_ids_of_its_first_requests(taker: Taker) -> None:
    audit = taker.audit()
    for number in range(9):
        audit.request(Action.REQUESTS_REFUSED, "model", request_id=f"id-{number}")
    audit.request(Action.REQUESTS_REFUSED, "unauthenticated")
    end(audit)
    assert [(line.count, line.request_ids) for line in taker.lines] == [
        (9, tuple(f"id-{number}" for number in range(8))),
        (1, None),
    ]


def test_requests_that_were_served_are_told_once_a_minute_and_at_the_end(taker: Taker) -> None:
    audit = taker.audit()
    for _ in range(2):
        audit.request(Action.REQUESTS_SERVED, scope="c0ffee00c0ff")
        audit.turn()
        written(audit)
    assert not taker.lines
    taker.now_s += SERVED_EVERY_S
    audit.turn()
    written(audit)
    audit.request(Action.REQUESTS_SERVED, scope="c0ffee00c0ff")
    end(audit)
    assert shown(taker.lines) == [
        (Action.REQUESTS_SERVED, None, "c0ffee00c0ff", 2),
        (Action.REQUESTS_SERVED, None, "c0ffee00c0ff", 1),
    ]


def test_while_nobody_takes_lines_counting_goes_on_and_what_has_no_row_is_told_as_dropped(taker: Taker) -> None:
    audit = taker.audit(most_rows=2)
    taker.open.clear()
    audit.request(Action.REQUESTS_REFUSED, "model")
    audit.turn()
    assert taker.stuck.wait(WAIT_S)
    for reason in ("a", "b", "c", "a"):
        audit.request(Action.REQUESTS_REFUSED, reason)
        audit.turn()  # returns, though the line before is not taken
    for _ in range(3):
        audit.record(Action.API_KEYS_HELD, count=1)
    assert (audit.events, audit.dropped) == (8, 2)
    taker.open.set()
    written(audit)
    end(audit)
    assert shown(taker.lines) == [
        (Action.REQUESTS_REFUSED, "model", "_none", 1),
        (Action.EVENTS_DROPPED, None, None, 2),
        (Action.REQUESTS_REFUSED, "a", "_none", 2),
        (Action.REQUESTS_REFUSED, "b", "_none", 1),
        (Action.API_KEYS_HELD, None, None, 1),
        (Action.API_KEYS_HELD, None, None, 1),
    ]


def test_lines_that_cannot_be_written_count_as_dropped_and_are_told_when_it_works_again(taker: Taker) -> None:
    audit = taker.audit()
    taker.broken = True
    for _ in range(4):
        audit.request(Action.REQUESTS_REFUSED, "model")
    audit.turn()
    written(audit)
    assert audit.dropped == 4
    taker.broken = False
    end(audit)
    assert shown(taker.lines) == [(Action.EVENTS_DROPPED, None, None, 4)]
    assert [line.sequence for line in taker.lines] == [2]


def of_gate(capfd: pytest.CaptureFixture[str]) -> list[Line]:
    """Return what the gate of a test told on standard output, where nothing else is."""
    return [read_line(line.encode()) for line in capfd.readouterr().out.splitlines()]


async def test_each_fate_of_a_request_is_told_by_scope_and_reason(
    gate: World, capfd: pytest.CaptureFixture[str]
) -> None:
    await gate.ask(post("/v1/chat/completions", chat()))
    await gate.ask(post("/v1/chat/completions", chat(), NOBODY))
    await gate.ask(post("/v1/chat/completions", chat(), "wrong-key"))
    await gate.ask(post("/v1/chat/completions", chat(cache_salt="mine"), GLOBEX))
    await gate.acked(await gate.publish([entry("acme", suspended=True)]))
    await gate.ask(post("/v1/chat/completions", chat()))
    hand_over(gate.gate.audit)
    told = [line for line in of_gate(capfd) if line.action.value.startswith(("Requests", "Reuse"))]
    acme, globex = keyspace("acme")[:12], keyspace("globex")[:12]
    assert sorted(shown(told), key=str) == sorted(
        [
            (Action.REQUESTS_SERVED, None, acme, 1),
            (Action.REUSE_REFUSED, "unknown_tenant", "_none", 1),
            (Action.REQUESTS_REFUSED, "unauthenticated", "_none", 1),
            (Action.REQUESTS_REFUSED, "forbidden_key", globex, 1),
            (Action.REUSE_REFUSED, "suspended", acme, 1),
        ],
        key=str,
    )
    assert {(line.namespace, line.model, line.pod, line.tenant) for line in told} == {("ns", "tiny", "pod-1", None)}


async def test_the_log_has_the_ids_that_callers_sent_and_got(gate: World, capfd: pytest.CaptureFixture[str]) -> None:
    own = "X-Request-Id: mine-1\r\n"
    await gate.ask(post("/v1/chat/completions", chat(), extra=own))
    made = (await gate.ask(post("/v1/chat/completions", chat(), "wrong-key"))).headers["x-request-id"]
    hand_over(gate.gate.audit)
    logged = {line.action: line.request_ids for line in of_gate(capfd) if line.request_ids}
    assert logged == {Action.REQUESTS_SERVED: ("mine-1",), Action.REQUESTS_REFUSED: (made,)}


async def test_tenants_are_named_where_the_domain_says_so(gate: World, capfd: pytest.CaptureFixture[str]) -> None:
    revision = await gate.publish([entry("acme")], Rules(audit_tenants=True, drain_timeout_s=1))
    await gate.acked(revision)
    await gate.ask(post("/v1/chat/completions", chat()))
    await gate.ask(post("/v1/chat/completions", chat(), NOBODY))
    hand_over(gate.gate.audit)
    named = {line.action: line.tenant for line in of_gate(capfd) if line.tenant}
    assert named == {Action.REQUESTS_SERVED: "acme", Action.REUSE_REFUSED: "nobody"}


async def test_no_prompt_key_or_keyspace_is_in_a_line(gate: World, capfd: pytest.CaptureFixture[str]) -> None:
    await gate.ask(post("/v1/completions", {"prompt": "a very secret prompt"}))
    await gate.ask(post("/v1/completions", {"prompt": "x", "a_secret_name": 1}, "wrong-key"))
    hand_over(gate.gate.audit)
    out = capfd.readouterr().out
    assert "RequestsServed" in out
    for secret in (keyspace("acme"), "secret", "key-of-acme", "wrong-key"):
        assert secret not in out


async def test_other_api_keys_are_told_by_their_number(gate: World, capfd: pytest.CaptureFixture[str]) -> None:
    await gate.publish_keys(acme="another-key")
    await until(lambda: len(gate.gate.keys.ring) == 1)
    hand_over(gate.gate.audit, last=False)
    assert [line.count for line in of_gate(capfd) if line.action is Action.API_KEYS_HELD][-1] == 1


async def test_data_keys_that_come_and_go_are_told_by_their_number(
    gate: World, capfd: pytest.CaptureFixture[str]
) -> None:
    out = ""

    def held() -> list[int | None]:
        nonlocal out
        gate.gate.audit.turn()
        out += capfd.readouterr().out
        lines = [read_line(line) for line in out.encode().splitlines()]
        return [line.count for line in lines if line.action is Action.DATA_KEYS_HELD]

    await gate.acked(await gate.publish([entry("acme", keys=(DataKey(1, b"k" * 32),))]))
    await until(lambda: held() == [1])
    await gate.acked(await gate.publish([entry("acme")]))
    await until(lambda: held() == [1, 0])
    assert "kkkk" not in out
    assert b"k".hex() * 4 not in out


async def test_requests_are_answered_while_nobody_takes_lines(gate: World, taker: Taker) -> None:
    taker.open.clear()
    stuck = taker.audit()
    gate.gate.audit = gate.gate.tenants.audit = stuck
    for _ in range(3):
        assert (await gate.ask(post("/v1/chat/completions", chat()))).status == 200
        assert (await gate.ask(post("/v1/chat/completions", chat(), "wrong-key"))).status == 401
        stuck.turn(last=True)
    assert taker.stuck.wait(WAIT_S)
    assert (await gate.ask(post("/v1/chat/completions", chat()))).status == 200
    page = (await gate.get("/metrics")).body.decode()
    assert "kvstrata_gate_audit_events_total 7" in page
    assert "kvstrata_gate_audit_dropped_total 0" in page

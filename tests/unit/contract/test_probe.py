"""Messages of the isolation probe: what cannot be is refused, and an outcome says what its counts do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract import ContractError
from kvstrata.contract.messages.adapter import decode_answer, decode_request, encode_answer, encode_request
from kvstrata.contract.messages.probe import (
    ForgetRequest,
    Forgotten,
    Probed,
    ProbedTier,
    ProbeOutcome,
    ProbeRequest,
    outcome_of,
)
from kvstrata.contract.wire import to_wire

ROW = ProbedTier("shared", "Redis", 2, 2, 3, 0, 1, 1, 0)
SAID = Probed("gate", "cache", 7, 1, ProbeOutcome.ISOLATED, 4, 3, (ROW,))


def test_messages_come_back_as_they_were() -> None:
    broken = replace(ROW, foreign_hits=1)
    failed = replace(SAID, outcome=ProbeOutcome.FOREIGN_HIT, tiers=(broken,), culprits=("Tenant/a", "Tenant/b"))
    for said in (SAID, failed):
        assert Probed.decode(said.encode()) == said
    assert ProbeRequest.decode(ProbeRequest(7, 3).encode()) == ProbeRequest(7, 3)
    forget = ForgetRequest("a" * 32, bytes(64))
    assert decode_request(encode_request(forget)) == forget
    assert decode_answer(Forgotten, encode_answer(Forgotten("boot", 3, 1))) == Forgotten("boot", 3, 1)


@pytest.mark.parametrize(
    ("change", "proven"),
    [
        ({}, True),
        ({"control_hits": 1}, False),
        ({"controls": 1, "control_hits": 1}, False),
        ({"controls": 0, "control_hits": 0}, False),
        ({"refused": 3}, False),
        ({"foreign": 0, "refused": 0}, False),
        ({"foreign_hits": 1}, False),
        ({"altered_hits": 1}, False),
    ],
)
def test_a_tier_is_proven_only_by_misses_between_controls_that_hit(change: dict[str, Any], proven: bool) -> None:
    assert replace(ROW, **change).proven is proven


def test_what_was_found_weighs_more_than_what_was_not() -> None:
    found, wrong, nothing = replace(ROW, foreign_hits=1), replace(ROW, altered_hits=1), replace(ROW, control_hits=0)
    assert outcome_of((ROW, wrong, found), clashes=False) is ProbeOutcome.FOREIGN_HIT
    assert outcome_of((ROW, wrong), clashes=False) is ProbeOutcome.WRONG_HIT
    assert outcome_of((nothing, ROW), clashes=False) is ProbeOutcome.ISOLATED
    assert outcome_of((nothing,), clashes=False) is ProbeOutcome.NO_CONTROL
    assert outcome_of((), clashes=True) is ProbeOutcome.FOREIGN_HIT


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "Isolated", "tiers": [to_wire(replace(ROW, foreign_hits=1))]},
        {"outcome": "Isolated", "tiers": []},
        {"outcome": "Isolated", "clashes": True},
        {"outcome": "ForeignHit"},
        {"outcome": "Perfect"},
        {"tiers": [to_wire(ROW) | {"control_hits": 3}]},
        {"tiers": [to_wire(ROW) | {"foreign_hits": -1}]},
        {"tiers": [to_wire(ROW)] * 65},
        {"clashes": 1},
        {"contract": 99},
        {"revision": "7"},
    ],
)
def test_an_answer_that_contradicts_itself_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        Probed.decode(json.dumps(json.loads(SAID.encode()) | change).encode())


@pytest.mark.parametrize("readers", [0, 17, -1])
def test_a_request_that_no_gate_would_take_is_not_sent(readers: int) -> None:
    with pytest.raises(ContractError):
        ProbeRequest(1, readers).encode()


@pytest.mark.parametrize("chunks", [b"", bytes(31), bytes(32 * 65)])
def test_what_is_no_list_of_chunks_is_not_forgotten(chunks: bytes) -> None:
    with pytest.raises(ContractError):
        decode_request(encode_request(ForgetRequest("a" * 32, chunks)))

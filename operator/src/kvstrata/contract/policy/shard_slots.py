"""The two slots of each shard of a bundle: one is read, the other may be filled."""

from __future__ import annotations

from typing import Annotated

from kvstrata.contract.wire import Form

SLOTS = ("a", "b")
Slot = Annotated[str, Form("[ab]", "slot")]


def other_slot(slot: str) -> str:
    """Return the slot that a writer may fill while readers use `slot`."""
    return SLOTS[1 - SLOTS.index(slot)]

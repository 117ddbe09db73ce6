"""Rules for slots on their way: open ones, scaling and draining."""

from __future__ import annotations

from .steps import Rule

REPAIR: tuple[Rule, ...] = ()
"""Slots that are open between two servers: moves that were begun are continued or closed. Before the capacity."""

SCALE: tuple[Rule, ...] = ()
"""Slots where the goal wants them, and shards that are drained. After the capacity, before a roll."""

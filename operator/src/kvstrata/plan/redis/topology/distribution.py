"""Which slots should go where, so that every shard has its part and as few as possible move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.model.redis.cluster import SlotRange
from kvstrata.plan.redis.topology.view import count


@dataclass(frozen=True, slots=True)
class Transfer:
    """Slots that one node has too many and another too few, in the order in which they are to go.

    Whatever part of them went first, what is transferred from then on continues it: ranges grow at one end.
    """

    source: str
    target: str
    slots: tuple[int, ...]


def parts(owned: Mapping[str, int], nodes: Sequence[str]) -> Mapping[str, int]:
    """How many slots each of `nodes` is to have: equally many, or one more for those that have most already.

    Of equals the last get one more, as in 16,384 slots that are cut at `16384 * n // nodes`.
    """
    each, more = divmod(sum(owned.values()), len(nodes))
    most = sorted(range(len(nodes)), key=lambda place: (-owned.get(nodes[place], 0), -place))[:more]
    return {node: each + (place in most) for place, node in enumerate(nodes)}


def transfers(owned: Mapping[str, Sequence[SlotRange]], nodes: Sequence[str]) -> tuple[Transfer, ...]:
    """What has to move so that `nodes` have all slots in equal parts, and others none; nothing that need not.

    Ranges stay whole where they can: what lies beside slots of the taker goes first, from the near end on, then whole
    ranges, then the ends of ranges.
    """
    sizes = {node: count(ranges) for node, ranges in owned.items()}
    wanted = parts(sizes, nodes)
    surplus = {node: size - wanted.get(node, 0) for node, size in sizes.items() if size > wanted.get(node, 0)}
    lack = {node: wanted[node] - sizes.get(node, 0) for node in nodes if wanted[node] > sizes.get(node, 0)}
    left = {node: sorted(owned[node]) for node in surplus}
    moves: dict[tuple[str, str], list[int]] = {}

    def take(source: str, target: str, piece: SlotRange, *, from_end: bool) -> None:
        number = min(surplus[source], lack[target], count([piece]))
        first, last = (piece[1] - number + 1, piece[1]) if from_end else (piece[0], piece[0] + number - 1)
        left[source].remove(piece)
        rest = ((piece[0], first - 1), (last + 1, piece[1]))
        left[source] = sorted([*left[source], *(part for part in rest if part[0] <= part[1])])
        surplus[source] -= number
        lack[target] -= number
        slots = range(last, first - 1, -1) if from_end else range(first, last + 1)
        moves.setdefault((source, target), []).extend(slots)

    for source in surplus:
        for target in lack:
            for piece, from_end in _beside(left[source], owned.get(target, ())):
                if surplus[source] and lack[target]:
                    take(source, target, piece, from_end=from_end)
    for source in surplus:
        for target in lack:
            while surplus[source] and lack[target]:
                room = min(surplus[source], lack[target])
                whole = [piece for piece in left[source] if count([piece]) <= room]
                piece = max(whole or left[source], key=lambda one: count([one]) * (1 if whole else -1))
                take(source, target, piece, from_end=True)
    return tuple(Transfer(source, target, tuple(slots)) for (source, target), slots in moves.items())


def side_by_side(found: Sequence[Transfer]) -> Iterator[Transfer]:
    """Those of the transfers that can be under way at once: no node takes part in two."""
    busy: set[str] = set()
    for one in found:
        if not busy & {one.source, one.target}:
            busy |= {one.source, one.target}
            yield one


def _beside(pieces: Sequence[SlotRange], others: Sequence[SlotRange]) -> list[tuple[SlotRange, bool]]:
    """The pieces that touch one of `others`, each with whether it does so at its end."""
    begins, ends = {first for first, _ in others}, {last for _, last in others}
    touching = [(piece, piece[1] + 1 in begins) for piece in pieces]
    return [(piece, at_end) for piece, at_end in touching if at_end or piece[0] - 1 in ends]

"""Checks whether anything of given keyspaces is left in a tier, on every server, including replicas.

The operator's own check after a deletion by `kvstrata_sidecar.delete_job`, as the only user that may list names; it
writes nothing. Cluster servers list the slots of the keyspaces, 17 of each; others, and those with too many names in a
slot, are scanned. A look counts only if the slot map is the same before and after; otherwise it is repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import redis.asyncio as redis

from kvstrata.clients.redis.external import coarse
from kvstrata.clients.redis.key_names import Names, Sorted, parts
from kvstrata.clients.redis.node_answers import NotAnAnswerError, parse_fields, parse_nodes
from kvstrata.clients.redis.probe import Access, Failure, ask, endpoint_of, parse_endpoint, pipelined
from kvstrata.contract.wire import digest
from kvstrata.model.redis.cluster import SLOTS, Peer

ATTEMPTS = 3
AT_ONCE = 8
ANSWER_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 900.0
"""For one server."""

SLOTS_AT_ONCE = 256
NAMES_IN_A_SLOT = 8_000
"""Names requested at once, which takes a server a few ms. A slot with more, which Redis cannot list in parts, is
found by a scan of the whole server."""

SCAN_COUNT = 250
PAUSE = 1.0
"""Pause after a command, as a multiple of its duration."""

MAX_NAMES = 4_096
"""Value names that a look returns, of all that it counts: as many as one deletion takes by name."""

Question = Callable[[redis.Redis], Awaitable[Any]]

NODE_UNKNOWN = "NodeUnknown"
SLOTS_MOVING = "SlotsMoving"
SLOTS_UNSERVED = "SlotsUnserved"
SLOT_MAP_CHANGED = "SlotMapChanged"


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One server's content of the keyspaces. `node` is its own id; a replica's counts are those of its copy.

    `values` are blocks, `index` everything else, on a primary without the tombstones that a deletion leaves for a week.
    `names` are those of values, at most MAX_NAMES, and `value_bytes` their size on a primary. `idle`: a primary without
    slots. At most `unsought` are values of other chunks.
    """

    node: str
    address: str
    primary: bool
    values: int = 0
    value_bytes: int = 0
    index: int = 0
    names: tuple[str, ...] = ()
    idle: bool = False
    unsought: int = 0


@dataclass(frozen=True, slots=True)
class TierLook:
    """Result of a look. `slots_before` and `slots_after` are digests of the slot map."""

    nodes: tuple[NodeLook, ...]
    problems: tuple[Failure, ...]
    slots_before: str
    slots_after: str

    @property
    def empty(self) -> bool:
        """Whether it is proven that no server has a value or an index of the keyspaces."""
        clean = bool(self.nodes) and not any(one.values or one.index for one in self.nodes)
        return clean and not self.problems and self.slots_before == self.slots_after


@dataclass(frozen=True, slots=True)
class Standing:
    """A server's state: its primary if it is a replica, its slots, and whether any is being moved."""

    node: str
    address: str
    proves: str
    primary: str | None = None
    slots: tuple[tuple[int, int], ...] = ()
    moving: bool = False

    def look(self, **counted: Any) -> NodeLook:
        idle = self.primary is None and not self.slots
        return NodeLook(self.node, self.address, self.primary is None, idle=idle, **counted)


@dataclass(frozen=True, slots=True)
class TierVerifier:
    """Checks one tier through `endpoint`, as the operator's user."""

    endpoint: str
    server_name: str
    access: Access
    _: KW_ONLY
    cluster: bool
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    names_in_a_slot: int = NAMES_IN_A_SLOT
    _limit: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def servers(self, domain: str, keyspaces: Sequence[str]) -> TierLook:
        """Return the servers, and obstacles to a look, without counting anything. Raises only when cancelled."""
        standings, problems = await self._standings(Names(domain, frozenset(keyspaces)))
        slots = _digest(standings)
        return TierLook(tuple(one.look() for one in standings), tuple(dict.fromkeys(problems)), slots, slots)

    async def look(self, domain: str, keyspaces: Sequence[str], chunks: Sequence[str] = ()) -> TierLook:
        """Check every server, for all of the keyspaces or only blocks of `chunks`. Raises only when cancelled."""
        names = Names(domain, frozenset(keyspaces), frozenset(chunks))
        found = TierLook((), (), "", "")
        for _ in range(ATTEMPTS):
            before, problems = await self._standings(names)
            results = await asyncio.gather(*(self._one(standing, names) for standing in before))
            after, later = await self._standings(names)
            looks = tuple(one for one in results if isinstance(one, NodeLook))
            ordered = dict.fromkeys([*problems, *(one for one in results if isinstance(one, Failure)), *later])
            found = TierLook(looks, tuple(ordered), _digest(before), _digest(after))
            if found.slots_before == found.slots_after:
                return found
        changed = Failure(SLOT_MAP_CHANGED, f"slots of {self.endpoint} went to other servers during {ATTEMPTS} looks")
        return replace(found, problems=(*found.problems, changed))

    async def _standings(self, names: Names) -> tuple[tuple[Standing, ...], list[Failure]]:
        if not self.cluster:
            return await self._single()
        seed = await self._ask(self.endpoint, self.server_name, _peers)
        if isinstance(seed, Failure):
            return (), [seed]
        # A single-server cluster does not know its own address.
        host, _ = parse_endpoint(self.endpoint) or ("", 0)
        known: dict[str, Peer] = {peer.node_id: replace(peer, ip=peer.ip or host) for peer in seed}
        by_node: dict[str, Standing] = {}
        problems: list[Failure] = []
        while unasked := [_unasked(peer) for node, peer in known.items() if node not in by_node]:
            answers = await asyncio.gather(*(self._ask(one.address, one.proves, _peers) for one in unasked))
            for standing, answer in zip(unasked, answers, strict=True):
                by_node[standing.node] = standing
                if isinstance(answer, Failure):
                    problems.append(answer)
                elif (itself := next((one for one in answer if one.node_id == standing.node), None)) is None:
                    problems.append(Failure(NODE_UNKNOWN, f"another server answers at {standing.address}"))
                else:
                    moving = bool(itself.migrating or itself.importing)
                    by_node[standing.node] = replace(
                        standing, primary=itself.primary, slots=itself.slots, moving=moving
                    )
                    known = {one.node_id: one for one in answer} | known
        standings = tuple(sorted(by_node.values(), key=lambda one: one.node))
        moving_at = (one.address for one in standings if one.moving)
        problems += [Failure(SLOTS_MOVING, f"slots are on their way at {address}") for address in moving_at]
        owned = (slots for one in standings if one.primary is None for slots in one.slots)
        served = {slot for first, last in owned for slot in range(first, last + 1)}
        if missing := len(names.slots - served):
            problems.append(Failure(SLOTS_UNSERVED, f"{missing} slots of the keyspaces have no server"))
        return standings, problems

    async def _single(self) -> tuple[tuple[Standing, ...], list[Failure]]:
        answer = await self._ask(self.endpoint, self.server_name, _figures)
        if isinstance(answer, Failure):
            return (), [answer]
        itself = _standing_alone(self.endpoint, self.server_name, answer)
        standings, problems = [itself], []
        for address in _replicas(answer):
            figures = await self._ask(address, self.server_name, _figures)
            if isinstance(figures, Failure):
                problems.append(figures)
            else:
                standings.append(_standing_alone(address, self.server_name, figures))
        if itself.primary is not None:
            problems.append(Failure(NODE_UNKNOWN, f"{self.endpoint} is a replica: its primary was not looked at"))
        return tuple(standings), problems

    async def _one(self, standing: Standing, names: Names) -> NodeLook | Failure:
        async def question(client: redis.Redis) -> NodeLook:
            server = _Server(client, self.pause)
            return await _look(server, standing, await self._found(server, names))

        async with self._limit:
            look: NodeLook | Failure = await self._ask(standing.address, standing.proves, question, LOOK_TIMEOUT_S)
            return look

    async def _found(self, server: _Server, names: Names) -> Sorted:
        """Return a server's names."""
        if not self.cluster:
            return await _walk(server, names)
        slots = sorted(names.slots)
        counts: dict[int, int] = {}
        for some in parts(slots, SLOTS_AT_ONCE):
            answers = await server.ask([("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in some])
            counts |= {slot: count for slot, count in zip(some, answers, strict=True) if count}
        if any(count > self.names_in_a_slot for count in counts.values()):
            return await _walk(server, names)
        found = Sorted(names)
        for slot, count in counts.items():
            # A margin for keys that arrived after the count.
            (listed,) = await server.ask([("CLUSTER", "GETKEYSINSLOT", slot, count + 256)])
            found.add(listed)
        return found

    async def _ask(self, address: str, proves: str, question: Question, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        answer = await ask(address, self.access, question, server_name=proves, timeout_s=timeout_s)
        is_hidden = self.access.allowed is not None and address != self.endpoint and isinstance(answer, Failure)
        return coarse(address, answer) if is_hidden else answer


class _Server:
    """Commands to one server, with a pause as long as each took."""

    def __init__(self, client: redis.Redis, pause: Callable[[float], Awaitable[None]]) -> None:
        self._client = client
        self._pause = pause
        client.response_callbacks.clear()

    async def ask(self, commands: Sequence[Sequence[Any]], *, errors: bool = False) -> list[Any]:
        began_s = time.monotonic()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answers = await pipelined(self._client, commands, errors=errors)
        await self._pause(PAUSE * (time.monotonic() - began_s))
        return answers


async def _walk(server: _Server, names: Names) -> Sorted:
    found, cursor = Sorted(names), "0"
    while True:
        ((cursor, listed),) = await server.ask([("SCAN", cursor, "MATCH", names.pattern, "COUNT", SCAN_COUNT)])
        found.add(listed)
        if cursor == "0":
            return found


async def _look(server: _Server, standing: Standing, found: Sorted) -> NodeLook:
    size, index, names = 0, len(found.others), tuple(sorted(found.values)[:MAX_NAMES])
    if standing.primary is None:
        for some in parts(sorted(found.states), SLOTS_AT_ONCE):
            answers = await server.ask([("HEXISTS", name, "tombstone") for name in some], errors=True)
            index += sum(answer != 1 for answer in answers)
        for some in parts(names, SLOTS_AT_ONCE):
            answers = await server.ask([("STRLEN", name) for name in some], errors=True)
            size += sum(answer for answer in answers if isinstance(answer, int))
    return standing.look(values=len(found.values), value_bytes=size, index=index, names=names, unsought=found.unsought)


async def _peers(client: redis.Redis) -> tuple[Peer, ...]:
    client.response_callbacks.clear()
    return parse_nodes(str(await client.execute_command("CLUSTER", "NODES")))  # type: ignore[no-untyped-call]


async def _figures(client: redis.Redis) -> Mapping[str, str]:
    client.response_callbacks.clear()
    answer = await client.execute_command("INFO", "server", "replication")  # type: ignore[no-untyped-call]
    figures = parse_fields(str(answer))
    if "run_id" not in figures:
        raise NotAnAnswerError("INFO without an id")
    return figures


def _standing_alone(address: str, proves: str, figures: Mapping[str, str]) -> Standing:
    primary = figures.get("master_host") if figures.get("role") == "slave" else None
    slots = ((0, SLOTS - 1),) if primary is None else ()
    return Standing(figures["run_id"], address, proves, primary, slots)


def _replicas(figures: Mapping[str, str]) -> Iterable[str]:
    for name, value in figures.items():
        if name.startswith("slave") and name.removeprefix("slave").isdigit():
            about = dict(part.partition("=")[::2] for part in value.split(","))
            yield endpoint_of(about.get("ip", ""), str(about.get("port")))


def _unasked(peer: Peer) -> Standing:
    return Standing(peer.node_id, endpoint_of(peer.ip, peer.port), peer.hostname or peer.ip)


def _digest(standings: Sequence[Standing]) -> str:
    return digest([[one.node, one.primary, [list(pair) for pair in one.slots], one.moving] for one in standings])

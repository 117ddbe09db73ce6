"""One thread's transport of commands to the nodes that have their slots.

MOVED is followed to the named node, with a request for a new map; ASK for this command alone, and only to read. A slot
that moves key by key is in two places; a script that wrote in one would miss the other, so stores are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstrata_sidecar.adapter.params import TierParams
from kvstrata_sidecar.adapter.redis.client.block_io import Accepted, Read, Write
from kvstrata_sidecar.adapter.redis.client.connection import Connection
from kvstrata_sidecar.adapter.redis.client.connections import Connections
from kvstrata_sidecar.adapter.redis.client.dial import dial
from kvstrata_sidecar.adapter.redis.client.nodes import Node, Topology
from kvstrata_sidecar.adapter.redis.client.resp import (
    FOREIGN_KEY,
    PIPELINE_COMMANDS,
    AccessError,
    Command,
    NodeAwayError,
    ReplyError,
    SlotMovingError,
    TransportError,
    spelled_out,
    unknown_script,
)
from kvstrata_sidecar.adapter.redis.client.slots import Address, redirection, slot_of

MAX_REDIRECTIONS = 5
NOT_THE_NODES_FAULT = frozenset({"OOM", "MOVED", "ASK", "TRYAGAIN"})
WRITES = frozenset({b"EVAL", b"EVALSHA", b"SET"})


class ClusterTransport:
    """One thread's connections to a tier's nodes; any thread may call `abort`. `dial(node)` is abandoned after
    `dial_timeout_s`. With `strangers` (TLS), nodes that the map does not name are followed.
    """

    def __init__(
        self, topology: Topology, dial: Callable[[Node], Connection], *, strangers: bool, dial_timeout_s: float
    ) -> None:
        self._topology = topology
        self._strangers = strangers
        self._nodes = Connections(topology, dial, dial_timeout_s)

    @property
    def usable(self) -> bool:
        return self._nodes.usable

    def renew(self) -> None:
        self._nodes.renew()

    def abort(self, why: str = "") -> None:
        """Fail all exchanges at once, running and later ones, until `renew`; `why` blames the node."""
        self._nodes.abort(why)

    def close(self) -> None:
        self._nodes.close()

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        answers = self.ask_each(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def ask_each(self, commands: Sequence[Command]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        todo: dict[tuple[Node, bool], list[int]] = {}
        asked = list(commands)
        judged: dict[Node, ReplyError | None] = {}
        only = self._topology.only
        if only is not None and commands:
            todo[only, False] = [*range(len(commands))]
        else:
            for index, one in enumerate(commands):
                try:
                    todo.setdefault((self._topology.owner(one.key), False), []).append(index)
                except NodeAwayError as error:
                    answers[index] = error
        for turn in range(MAX_REDIRECTIONS + 1):
            self._round(todo, asked, answers)
            again: dict[tuple[Node, bool], list[int]] = {}
            for (node, asking), indices in todo.items():
                failed = [index for index in indices if isinstance(answers[index], Exception)]
                if len(failed) < len(indices):
                    judged.setdefault(node, None)
                for index in failed:
                    answer = answers[index]
                    if not isinstance(answer, ReplyError):
                        continue
                    target = None if turn == MAX_REDIRECTIONS else self._next(node, asking, asked, index, answer)
                    if target is None:
                        answers[index] = self._meaning(node, answer)
                        if answers[index] is answer:
                            judged[node] = answer
                    else:
                        again.setdefault(target, []).append(index)
            if not again:
                break
            todo = again
        for node, fault in judged.items():
            self._judge(node, fault)
        return answers

    def set_each(self, writes: Sequence[Write]) -> None:
        def settle(node: Node, indices: list[int]) -> Iterator[tuple[int, ReplyError]]:
            self._nodes.use(node, lambda one: one.set_each([writes[index] for index in indices]))
            for index in indices:
                if isinstance(writes[index].answer, ReplyError):
                    yield index, writes[index].answer

        def fail(node: Node, index: int, error: ReplyError) -> None:
            writes[index].answer = self._judged(node, error)

        self._follow([write.key for write in writes], settle, fail)

    def get_each(self, reads: Sequence[Read]) -> list[bool]:
        """Read values; for each whether it is there and counts. Raises the first error reply."""
        found = [False] * len(reads)

        def settle(node: Node, indices: list[int]) -> Iterator[tuple[int, ReplyError]]:
            left = indices
            while left:
                replies = self._nodes.use(node, lambda one: one.get_each([reads[index] for index in left]))  # noqa: B023
                unknown: list[int] = []
                for index, outcome in zip(left, replies, strict=True):
                    if isinstance(outcome, ReplyError):
                        yield index, outcome
                    elif outcome is None:
                        unknown.append(index)
                    else:
                        found[index] = outcome
                left = unknown

        def fail(node: Node, index: int, error: ReplyError) -> None:
            if error.code != "ASK" or not self._topology.cluster:
                raise self._judged(node, error) from error
            found[index] = self._get_apart(node, reads[index])

        self._follow([read.key for read in reads], settle, fail)
        return found

    def _follow(
        self,
        keys: Sequence[bytes],
        settle: Callable[[Node, list[int]], Iterator[tuple[int, ReplyError]]],
        fail: Callable[[Node, int, ReplyError], None],
    ) -> None:
        """Run `settle`, which yields error replies, where the keys' slots are; `fail` receives the final errors."""
        todo: dict[Node, list[int]] = {}
        for index, key in enumerate(keys):
            todo.setdefault(self._topology.owner(key), []).append(index)
        for turn in range(MAX_REDIRECTIONS + 1):
            again: dict[Node, list[int]] = {}
            for node, indices in todo.items():
                refused = 0
                for index, error in settle(node, indices):
                    refused += 1
                    target = self._moved(node, error) if turn < MAX_REDIRECTIONS else None
                    if target is None:
                        fail(node, index, error)
                    else:
                        again.setdefault(target, []).append(index)
                if refused < len(indices):
                    self._judge(node, None)
            todo = again

    def probe(self, node: Node, question: Command | None, give_up_after_s: float) -> None:
        """Check that a node answers, regardless of its breaker's state. Raises the failure."""

        def ping(connection: Connection) -> None:
            connection.ping(give_up_after_s)
            if question is not None:
                (answer,) = connection.exchange([question], give_up_after_s=give_up_after_s)
                if isinstance(answer, ReplyError) and answer.code not in NOT_THE_NODES_FAULT:
                    raise answer

        self._nodes.use(node, ping, probing=True)

    def _get_apart(self, node: Node, read: Read) -> bool:
        """Read a value in a slot that moves key by key: the commands before it may be at another server."""
        if not read.accept(self.ask(read.before)):
            return False
        apart = Accepted(read)
        asking = False
        for _ in range(2):
            (outcome,) = self._nodes.use(node, lambda one: one.get_each([apart], asking=asking))  # noqa: B023
            if not isinstance(outcome, ReplyError):
                return bool(outcome)
            redirected = redirection(outcome, node.address, self._topology.known())
            target = None if redirected is None else self._topology.follow(redirected, strangers=self._strangers)
            if target is None or redirected is None:
                raise self._judged(node, outcome) from outcome
            node, asking = target, not redirected.for_good
        raise SlotMovingError("a block is redirected without end")

    def _round(self, todo: dict[tuple[Node, bool], list[int]], asked: list[Command], answers: list[Any]) -> None:
        """Ask each node its part, all at the same time.

        A node with two parts, because one slot has moved there and another is moving, receives the second after it
        answered the first: there is one connection to it.
        """
        if len(todo) == 1 or any(len(indices) > PIPELINE_COMMANDS for indices in todo.values()):
            for (node, asking), indices in todo.items():
                mine = [asked[index] for index in indices]
                self._note(answers, indices, lambda: self._nodes.use(node, lambda c: c.exchange(mine, asking=asking)))  # noqa: B023
            return
        begun: list[tuple[Node, bool, list[int], Connection]] = []
        second = {part: indices for part, indices in todo.items() if part[1] and (part[0], False) in todo}
        try:
            for (node, asking), indices in todo.items():
                if (node, asking) in second:
                    continue
                outcome = self._note(answers, indices, self._starting(node, [asked[i] for i in indices], asking))
                if isinstance(outcome, Connection):
                    begun.append((node, asking, indices, outcome))
            while begun:
                node, asking, indices, connection = begun[0]
                self._note(answers, indices, self._finishing(node, connection, [asked[i] for i in indices], asking))
                begun.pop(0)
        finally:
            for *_, connection in begun:  # with unread answers
                connection.close()
        if second:
            self._round(second, asked, answers)

    def _starting(self, node: Node, mine: list[Command], asking: bool) -> Callable[[], Connection]:
        def start(connection: Connection) -> Connection:
            connection.start(mine, asking=asking)
            return connection

        return lambda: self._nodes.use(node, start, keep=True)

    def _finishing(
        self, node: Node, connection: Connection, mine: list[Command], asking: bool
    ) -> Callable[[], list[Any]]:
        return lambda: self._nodes.end(node, connection, lambda one: one.finish(mine, asking=asking))

    @staticmethod
    def _note(answers: list[Any], indices: list[int], do: Callable[[], Any]) -> Any:
        """Run `do`; set its outcome for each of `indices`."""
        try:
            outcome = do()
        except (TransportError, ReplyError) as error:
            outcome = error
            for index in indices:
                answers[index] = error
        if isinstance(outcome, list):
            for index, answer in zip(indices, outcome, strict=True):
                answers[index] = answer
        return outcome

    def _next(
        self, node: Node, asking: bool, asked: list[Command], index: int, answer: ReplyError
    ) -> tuple[Node, bool] | None:
        """Return where to ask again after an error reply, None if the error is final."""
        one = asked[index]
        if unknown_script(one, answer):
            asked[index] = spelled_out(one)
            return node, asking
        redirected = redirection(answer, node.address, self._topology.known()) if self._topology.cluster else None
        if redirected is None or redirected.slot != slot_of(one.key):
            return None
        if not redirected.for_good and (asking or one.arguments[0] in WRITES):
            return None
        target = self._topology.follow(redirected, strangers=self._strangers)
        return None if target is None else (target, not redirected.for_good)

    def _moved(self, node: Node, error: ReplyError) -> Node | None:
        redirected = redirection(error, node.address, self._topology.known()) if self._topology.cluster else None
        if redirected is None or not redirected.for_good:
            return None
        return self._topology.follow(redirected, strangers=self._strangers)

    def _judged(self, node: Node, error: ReplyError) -> Exception:
        """Return the error for the caller, and blame the node if it cannot serve."""
        meaning = self._meaning(node, error)
        if meaning is error:
            self._judge(node, error)
        return meaning

    def _judge(self, node: Node, fault: ReplyError | None) -> None:
        if fault is None:
            self._topology.succeeded(node)
        elif fault.code not in NOT_THE_NODES_FAULT:
            self._topology.blame(node, fault)

    def _meaning(self, node: Node, error: ReplyError) -> Exception:
        """Return the error for the caller."""
        if self._topology.cluster and (error.code in ("MOVED", "ASK", "TRYAGAIN") or FOREIGN_KEY in str(error)):
            self._topology.want()
            return SlotMovingError(f"{node}: {error}")
        return error


class Ways:
    """Makes a transport for each thread. Thread-safe."""

    def __init__(self, tier: TierParams, topology: Topology) -> None:
        self._tier = tier
        self._topology = topology

    def transport(self) -> ClusterTransport:
        timeout_s = 2 * (self._tier.connect_timeout_ms + self._tier.io_timeout_ms) / 1000
        return ClusterTransport(
            self._topology,
            self._connect,
            strangers=self._tier.tls is not None,
            dial_timeout_s=timeout_s * len(self._tier.endpoints),
        )

    def dial(self, address: Address) -> Connection:
        """Return an authenticated connection to a server. Raises as `dial.dial` does."""
        return dial(
            address,
            tls=self._tier.tls,
            username=self._tier.username,
            password_file=self._tier.password_file,
            connect_timeout_s=self._tier.connect_timeout_ms / 1000,
            io_timeout_s=self._tier.io_timeout_ms / 1000,
        )

    def _connect(self, node: Node) -> Connection:
        problems: list[TransportError | ReplyError] = []
        for address in node.addresses:
            try:
                connection = self.dial(address)
                if not self._tier.cluster:  # in a cluster the map has the roles
                    connection.expect_primary(self._tier.io_timeout_ms / 1000)
                return connection
            except (TransportError, ReplyError) as error:
                problems.append(error)
        raise next((problem for problem in problems if isinstance(problem, AccessError)), problems[0])

"""Record what servers of each kind answer into `tests/topology/answers`, for the tests of the parser.

    python -m tests.topology.record_answers

Names and addresses differ each time; the tests know none of them.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from kvstrata.clients.redis.nodes import QUESTIONS
from kvstrata.model.redis.cluster import ServerPod
from tests.tiers.server_kinds import KINDS, ServerKind
from tests.topology.rig import Rig

ANSWERS = Path(__file__).parent / "answers"


async def record(kind: ServerKind, directory: Path) -> dict[str, dict[str, Any]]:
    """Return the answers of one kind in several situations."""
    rig = Rig(directory, kind.command())
    found: dict[str, dict[str, Any]] = {}
    try:
        rig.start()
        for _ in range(100):
            if rig.is_up(await rig.look()):
                break
            await asyncio.sleep(0.1)
        found["fresh"] = ask(rig, rig.pod(0, 0))
        await rig.settle(until=rig.is_up)
        rig.write(60)
        primary, other = await rig.primary(0), await rig.primary(1)
        replica = await rig.replica(0)
        names = {pod.uid: (await rig.server(pod)).node_id for pod in (primary, other)}
        with rig.client(primary) as client, rig.client(other) as target:
            target.execute_command("CLUSTER", "SETSLOT", "5", "IMPORTING", names[primary.uid])
            client.execute_command("CLUSTER", "SETSLOT", "5", "MIGRATING", names[other.uid])
            found["primary"], found["importing"] = ask(rig, primary), ask(rig, other)
            found["replica"] = ask(rig, replica)
            for one in (client, target):
                one.execute_command("CLUSTER", "SETSLOT", "5", "STABLE")
            if kind.atomic_migration:
                client.execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", 7, 9, 11, 11, "NODE", names[other.uid])
                await asyncio.sleep(1)
                found["migrated"] = ask(rig, primary)
        alone = await rig.primary(2)
        rig.delete(await rig.replica(2))
        rig.kill(alone)
        found["suspecting"] = until(lambda: ask(rig, other), "fail? ")
        found["failed"] = until(lambda: ask(rig, other), "master,fail ")
        rig.restart(alone)
        found["no address"] = until(lambda: ask(rig, other), "noaddr")
    finally:
        rig.close()
    return found


def until(again: Callable[[], dict[str, Any]], text: str) -> dict[str, Any]:
    """Ask again until an answer holds a text."""
    give_up_at_s = time.monotonic() + 120
    while text not in (answers := again())["CLUSTER NODES"]:
        assert time.monotonic() < give_up_at_s, answers["CLUSTER NODES"]
        time.sleep(0.02)
    return answers


def ask(rig: Rig, pod: ServerPod) -> dict[str, Any]:
    """All that a look asks for, by the question's first two words; None where it is refused."""
    answers: dict[str, Any] = {}
    with redis.Redis(host=str(pod.ip), port=rig.port, decode_responses=True, protocol=2) as client:
        client.response_callbacks.clear()
        for question in QUESTIONS:
            try:
                answer = client.execute_command(*question)
                # Where the program lies says nothing of the server.
                without = re.sub(r"executable:\S*", "executable:", answer) if isinstance(answer, str) else answer
                answers[" ".join(question[:2])] = without
            except redis.ResponseError:
                answers[" ".join(question[:2])] = None
    return answers


def main() -> None:
    """Record all kinds."""
    ANSWERS.mkdir(exist_ok=True)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            found = asyncio.run(record(kind, Path(directory)))
        (ANSWERS / f"{kind.name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

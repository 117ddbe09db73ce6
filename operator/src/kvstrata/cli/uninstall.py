"""The Job that Helm runs before it uninstalls a release: refuse while objects need the operator, or release them.

It stops the operator before the last look, so that no finalizer is set after it. A refusal, a failure or SIGTERM starts
the operator again. Otherwise its claims of namespaces, and of the operator's Lease, end.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from kvstrata.api.cachedomain import CacheDomain
from kvstrata.clients.kube import Kube, KubeError
from kvstrata.clients.lease import LEASE_NAME, RELEASE
from kvstrata.clients.resources import BY_KIND, LEASE, POD
from kvstrata.plan.uninstall import UNPROVEN, HeldObject, held_objects, refusal, released

KINDS = tuple(UNPROVEN)
LOOK_AGAIN_S = 1.0
STOP_S = 180.0
"""How long the operator's pods may take to end; less than the Job has with the pull of its image."""


class Uninstall:
    def __init__(self, kube: Kube, options: argparse.Namespace, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._kube, self._options, self._sleep = kube, options, sleep
        self._served, self._unsure = frozenset(one for one in options.watch_namespaces.split(",") if one), ""

    async def run(self) -> tuple[int, str]:
        """Return the exit code, not 0 if the release must stay, and its reason. Raises KubeError, and TimeoutError if
        the operator does not end."""
        release, namespace, revision = self._options.release, self._options.namespace, self._options.revision
        if (held := await self._held()) and not self._options.release_objects:
            return 1, refusal(held, release, namespace, revision)
        ended = False
        try:
            async with asyncio.timeout(STOP_S):
                await self._stop_operator()
            if (held := await self._held()) and not self._options.release_objects:
                return 1, refusal(held, release, namespace, revision)
            for one in held:
                await self._release(one)
            await self._end_claims()
            ended = True
        finally:
            if not ended:
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)  # it would end the restart
                await self._kube.scale(namespace, self._options.deployment, self._options.replicas)
        return 0, (released(held) if held else f"no object needs the operator of release {release}") + self._unsure

    async def _held(self) -> tuple[HeldObject, ...]:
        """Return the objects that wait for this release. If others serve namespaces of this cluster, too, those of a
        namespace without a claim may be theirs: they hold a release of the whole cluster, and it releases none."""
        claims = [(raw["metadata"]["namespace"], own) for raw, own in await self._claimed()]
        others = {namespace for namespace, own in claims if not own}
        found = [raw for kind in KINDS for raw in await self._list(kind) if raw["metadata"]["namespace"] not in others]
        held = held_objects(found, self._served)
        if not (self._options.release_objects and others and not self._served):
            return held
        sure = tuple(one for one in held if (one.namespace, True) in claims)
        left = "".join(f"\n  {one}" for one in held if one not in sure)
        self._unsure = f"\nThese may be another release's, and keep their finalizers:{left}" if left else ""
        return sure

    async def _claimed(self) -> list[tuple[dict[str, Any], bool]]:
        """Return the claimed CacheDomains, and whether by this release."""
        own = (self._options.namespace, self._options.release)
        claims = [(raw, (raw.get("status") or {}).get("servedBy")) for raw in await self._list(CacheDomain.INFO.kind)]
        return [(raw, (claim.get("namespace"), claim.get("release")) == own) for raw, claim in claims if claim]

    async def _list(self, kind: str) -> list[dict[str, Any]]:
        try:
            return [raw async for raw in self._kube.list(BY_KIND[kind], None)]
        except KubeError as error:
            if not error.is_not_found:
                raise
            return []  # The CustomResourceDefinition is gone, and its objects with it.

    async def _stop_operator(self) -> None:
        await self._kube.scale(self._options.namespace, self._options.deployment, 0)
        while [pod async for pod in self._kube.list(POD, self._options.namespace, self._options.selector)]:
            await self._sleep(LOOK_AGAIN_S)

    async def _end_claims(self) -> None:
        for metadata in [raw["metadata"] for raw, own in await self._claimed() if own]:
            where, change = (metadata["namespace"], metadata["name"]), {"servedBy": None}
            await self._kube.patch_status(BY_KIND["CacheDomain"], *where, change, metadata["resourceVersion"])
        lease = await self._kube.get(LEASE, self._options.namespace, LEASE_NAME)
        annotations = lease["metadata"].get("annotations") or {} if lease else {}
        if lease and annotations.get(RELEASE) == self._options.release:
            del annotations[RELEASE]
            await self._kube.replace(LEASE, self._options.namespace, lease)

    async def _release(self, one: HeldObject) -> None:
        try:
            await self._kube.set_finalizers(
                BY_KIND[one.kind], one.namespace, one.name, one.others, one.resource_version
            )
        except KubeError as error:
            if not error.is_not_found:
                raise


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvstrata.cli.uninstall", description=__doc__.partition("\n")[0])
    for name in ("release", "namespace", "revision", "deployment", "selector"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--watch-namespaces", default="", help="separated by commas; empty: all")
    parser.add_argument("--replicas", type=int, required=True, help="of the operator, should it be started again")
    parser.add_argument("--release-objects", action="store_true", help="remove finalizers instead of refusing")
    return parser.parse_args(arguments)


async def _main(options: argparse.Namespace) -> int:
    kube, task = await Kube.connect(), asyncio.current_task()
    if task is not None:  # the Job's time is over: the operator starts again
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        code, text = await Uninstall(kube, options, asyncio.sleep).run()
    except (KubeError, TimeoutError, asyncio.CancelledError) as error:
        ended = "the Job was ended" if isinstance(error, asyncio.CancelledError) else "the operator does not end"
        code, text = 1, f"the uninstall check failed, uninstall again: {str(error) or ended}"
    finally:
        await kube.close()
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(parse(sys.argv[1:]))))

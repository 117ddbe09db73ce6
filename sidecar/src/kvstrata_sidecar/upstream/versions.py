"""The versions of LMCache that can be governed, the choice among them at start, and the interface of each."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from kvstrata_sidecar.adapter.policy_tiers import Leave
from kvstrata_sidecar.adapter.tier.buffers import Spans
from kvstrata_sidecar.upstream.names import differences
from kvstrata_sidecar.upstream.pool import Pool

GOVERNED: Mapping[str, str] = {"0.5.6": "v0_5_6"}
"""The package of each version."""

SERVER = "server"
CONNECTOR = "connector"


class Chunks(Protocol):
    """LMCache's parts of chunks, one for each rank and group of layers."""

    def fingerprints(self) -> list[str]:
        """Return the fingerprints of the engines that have registered."""

    def names(self, keyspace: str, chunk_hashes: Sequence[bytes]) -> list[list[Any]] | None:
        """Return the keys of each chunk's counted parts, None before an engine registered its layout."""


class CacheServer(Protocol):
    """A version's `server` module. Its functions raise IncompatibleServerError for a server that they cannot govern.

    `AdapterBase` and `ListenerBase` are the base classes of L2 adapters and of the memory's listeners. `MISSING` is the
    answer of `reserve_read` for an absent key.
    """

    AdapterBase: Any
    ListenerBase: Any
    MISSING: object

    def bitmap(self, length: int, hits: Collection[int]) -> Any:
        """Return LMCache's bitmap of `length` bits with these set."""

    def store_result(self, successful: bool, stored_bytes: int) -> Any:
        """Return LMCache's result of a store task."""

    def no_usage(self) -> Any:
        """Return a usage of an L2 adapter that is unknown."""

    def manager(self, context: Any) -> Any:
        """Return the one manager of the server's memory."""

    def pool(self, manager: Any, spans: Spans) -> Pool: ...

    def entry_of(self, manager: Any) -> Callable[[Any], Any]:
        """Return the function that makes an entry of the manager's table which LMCache frees after its last read."""

    def store_again(self, manager: Any) -> Callable[[list[Any]], object]:
        """Return the function that has LMCache store blocks of its memory in all tiers behind it."""

    def chunks(self, context: Any) -> Chunks:
        """Return the names of chunks' parts."""

    def join(self, context: Any, module: str, name: str, params: Mapping[str, Any]) -> Leave:
        """Have LMCache make the adapter class `name` of `module` with these parameters, and use it behind those that it
        has; return the function that ends the use and closes the adapter."""

    def hasher(self, context: Any) -> tuple[int, Callable[[list[int]], Iterable[bytes]]]:
        """Return the tokens of a chunk, and the function that hashes whole chunks of token ids."""

    def copies_elsewhere(self, build_context: Any) -> bool:
        """Whether blocks pass through the server's heap on their way from and to the engine."""


class UngovernedVersionError(RuntimeError):
    """The installed LMCache has another version, or other names, than this package governs."""


def cache_server() -> CacheServer:
    """Return the cache server's side. Raises UngovernedVersionError."""
    return cast(CacheServer, load(SERVER))


def load(side: str) -> ModuleType:
    """Return the module of `side` for the installed LMCache, of any build. Raises UngovernedVersionError."""
    try:
        version = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        raise UngovernedVersionError("LMCache is not installed") from None
    package = GOVERNED.get(version.split("+")[0].split(".post")[0])
    if package is None:
        raise UngovernedVersionError(f"LMCache {version} is none of the governed versions ({', '.join(GOVERNED)})")
    needs = importlib.import_module(f"{__package__}.{package}.needs")
    if changed := differences(getattr(needs, side.upper())):
        raise UngovernedVersionError(f"LMCache {version} differs from the governed version: {'; '.join(changed)}")
    return importlib.import_module(f"{__package__}.{package}.{side}")

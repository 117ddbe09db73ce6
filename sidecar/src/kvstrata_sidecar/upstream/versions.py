"""The versions of LMCache that can be governed, and the choice among them at start."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from types import ModuleType

from kvstrata_sidecar.upstream.names import differences

GOVERNED: Mapping[str, str] = {"0.5.6": "v0_5_6"}
"""The package of each version."""

SERVER = "server"
CONNECTOR = "connector"


class UngovernedVersionError(RuntimeError):
    """The installed LMCache has another version, or other names, than this package governs."""


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

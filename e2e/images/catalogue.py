"""The images and the sources that they are built from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.settings import BOOKWORM, REPOSITORY, TRIXIE, Debian, Paths


@dataclass(frozen=True, slots=True)
class Image:
    """One image. Every build's context is the root of the repository; an ignore file beside the Dockerfile narrows it.

    Attributes:
        name: the short name, as on the command line.
        dockerfile: relative to the root of the repository.
        purpose: one line for people.
        is_product: whether the chart names it, so that its tag must be the chart's version.
        is_server: whether tests run its programs on this machine, too, so that they are unpacked when it is built.
        is_slow: whether it takes minutes to build, so that it is begun first.
        debian: its base system.
        arguments: further build arguments.
    """

    name: str
    dockerfile: str
    purpose: str
    is_product: bool = False
    is_server: bool = False
    is_slow: bool = False
    debian: Debian = TRIXIE
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def tag(self) -> str:
        """The name under which pods refer to it.

        The product's images carry its version, as the charts' defaults do; images of tests and demos are `local`.
        """
        return f"localhost/kvstrata-{self.name}:{version() if self.is_product else 'local'}"

    def name_in(self, registry: str) -> str:
        """The name in a registry: the chart's, so that a chart with `image.registry` finds it."""
        return f"{registry}/kvstrata-{self.name}:{version()}"

    def archive(self, paths: Paths) -> Path:
        """The docker-archive that a build writes."""
        return paths.images / f"kvstrata-{self.name}.tar"

    def build_command(self, paths: Paths) -> list[str]:
        """Arguments of ``python3 -m e2e.cluster`` that build it."""
        return [
            "image", "build",
            "--context", str(REPOSITORY),
            "--file", str(REPOSITORY / self.dockerfile),
            "--tag", self.tag,
            "--build-arg", f"BASE={self.debian.base_image}",
            *(word for item in self.arguments.items() for word in ("--build-arg", "=".join(item))),
            "--out", str(self.archive(paths)),
        ]  # fmt: skip


IMAGES = (
    Image("operator", "operator/Dockerfile", "the operator", is_product=True),
    Image(
        "sidecar",
        "sidecar/Dockerfile",
        "the gate, and the packages that run in cache and engine containers",
        is_product=True,
    ),
    Image("redis", "e2e/images/redis/Dockerfile", "Redis 8.0 for managed tiers", is_product=True, is_server=True),
    Image("valkey", "e2e/images/valkey/Dockerfile", "Valkey 8.1 for managed tiers", is_server=True),
    Image(
        "redis-7",
        "e2e/images/redis/Dockerfile",
        "the oldest Redis for managed tiers, 7.0",
        is_server=True,
        debian=BOOKWORM,
        arguments={"VERSION": "5:7.0.*"},
    ),
    Image(
        "engine-cpu",
        "e2e/images/engine-cpu/Dockerfile",
        "vLLM on CPU, LMCache and SmolLM2 (2.5 GB, minutes)",
        is_slow=True,
    ),
)


def version() -> str:
    """The project's version, which is also the charts'."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project: dict[str, str] = tomllib.load(file)["project"]
    return project["version"]


def select(names: Sequence[str]) -> tuple[Image, ...]:
    """The images of these names, in the order of the catalogue; all when there are no names.

    Raises:
        ValueError: a name is none of the catalogue's.
    """
    unknown = sorted(set(names) - {image.name for image in IMAGES})
    if unknown:
        known = ", ".join(image.name for image in IMAGES)
        raise ValueError(f"there is no image {', '.join(unknown)}; there are {known}")
    return tuple(image for image in IMAGES if not names or image.name in names)

"""Models for engines that run on this machine without a cluster, each made once under `.local/engine`."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from e2e.cluster import digests
from e2e.cluster.settings import REPOSITORY

MADE = REPOSITORY / ".local/engine"


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the program that makes it.

    Attributes:
        name: under which engines serve it.
        maker: a program of this folder; it runs in the engine's environment and takes the folder to make.
        lock: the packages that the program fetches, its second argument, relative to the repository.
        options: further arguments.
        dtype: of weights and KV in the engine. CPUs without instructions for bfloat16 compute it eight times slower.
    """

    name: str
    maker: str
    lock: str | None = None
    options: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    def folder(self, python: Path) -> Path:
        """Return its folder, which the engine's interpreter `python` makes when it is missing.

        Raises:
            AssertionError: it was not made; the message has the program's last lines.
        """
        maker = Path(__file__).with_name(self.maker)
        lock = [REPOSITORY / self.lock] if self.lock is not None else []
        made = MADE / f"{self.name}-{digests.digest_of({'options': self.options}, [maker, *lock])[:8]}"
        if not made.exists():
            MADE.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=MADE) as scratch:
                making = [str(python), str(maker), f"{scratch}/model", *map(str, lock), *self.options]
                ended = subprocess.run(making, capture_output=True, text=True, check=False)
                assert ended.returncode == 0, f"{self.maker} failed: {ended.stderr[-3000:]}"
                with suppress(OSError):  # another process was faster
                    Path(scratch, "model").rename(made)
        return made


SMOLLM2 = Model("smollm2", "smollm2.py", "requirements/engine-model.txt", dtype="float32")
"""A real model: 46,080 bytes of KV a token."""

RANDOM = Model("random", "random_llama.py")
RANDOM_WITH_MERGES = Model("random-merges", "random_llama.py", options=("--merges",))
RANDOM_WITH_WINDOWS = Model("random-windows", "random_llama.py", options=("--windows",))

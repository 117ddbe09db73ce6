"""A pod's container as a process: its command, its environment and its volumes, laid out in a folder.

It plays the kubelet where there is none. Paths of mounts are other ones here, so they are replaced in the command, in
the environment and in the files; nothing else is. The Python is one without any package, as in the sidecar's image.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstrata.objects import paths

ROOT = Path(__file__).resolve().parents[2]
Secrets = Callable[[str], Mapping[str, Any]]
"""Returns a Secret of the pod's namespace by its name."""


def plugin_folder(directory: Path) -> Path:
    """Make the folder with our packages as the sidecar's Dockerfile makes it."""
    plugin = directory / "plugin"
    (plugin / "kvstrata").mkdir(parents=True, exist_ok=True)
    for source, target in (
        ("operator/src/kvstrata/__init__.py", "kvstrata/__init__.py"),
        ("operator/src/kvstrata/contract", "kvstrata/contract"),
        ("sidecar/src/kvstrata_sidecar", "kvstrata_sidecar"),
    ):
        (plugin / target).unlink(missing_ok=True)
        (plugin / target).symlink_to(ROOT / source)
    return plugin


def start_container(pod: Mapping[str, Any], secrets: Secrets, directory: Path) -> subprocess.Popen[bytes]:
    """Start the only container of a pod (its spec). Its output and its errors go into one stream, as a log has them."""
    (container,) = pod["containers"]
    moved = {paths.PLUGIN_SOURCE: str(plugin_folder(directory))}
    for mounted in container["volumeMounts"]:
        moved[mounted["mountPath"]] = str(directory / mounted["name"])
    for mounted in container["volumeMounts"]:
        volume = next(one for one in pod["volumes"] if one["name"] == mounted["name"])
        folder = directory / mounted["name"]
        folder.mkdir(exist_ok=True)
        for name, value in secrets(volume["secret"]["secretName"])["data"].items():
            (folder / name).write_bytes(_replaced(base64.b64decode(value).decode(), moved).encode())
    program, *arguments = [_replaced(word, moved) for word in container["command"]]
    assert program == "python3"
    environment = {one["name"]: _replaced(one["value"], moved) for one in container["env"]}
    return subprocess.Popen(
        [sys.executable, "-S", *arguments],
        env=environment | {"PATH": os.environ["PATH"]},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _replaced(text: str, moved: Mapping[str, str]) -> str:
    for path, place in moved.items():
        text = text.replace(path, place)
    return text

"""Chromium without a window: a picture of a page, pixel by pixel."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
WIDTH, HEIGHT = 860, 700

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: `apt-get install --no-install-recommends chromium` brings one"
)


def colours(page: Path, picture: Path, *, dark: bool) -> Counter[str]:
    """Return the colours of the page's pixels, such as #ffffff, as a reader with this preference sees it.

    Raises:
        AssertionError: the browser failed, or reported an error of the page.
    """
    assert CHROMIUM is not None
    preference = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if dark else ()
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={picture.parent / 'profile'}", *preference,
            f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return Counter(_pixels(picture.read_bytes()))


def _pixels(png: bytes) -> list[str]:
    """Decode a PNG of eight bits for each of three or four channels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, png[28]) == (8, 0)
    channels = {2: 3, 6: 4}[kind]
    packed, place = b"", 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            packed += png[place + 8 : place + 8 + length]
        place += length + 12
    data, size = zlib.decompress(packed), width * channels
    before, found = bytearray(size), list[str]()
    for row in range(height):
        start = row * (size + 1)
        before = _unfiltered(data[start], bytearray(data[start + 1 : start + 1 + size]), before, channels)
        found += [f"#{before[at : at + 3].hex()}" for at in range(0, size, channels)]
    return found


def _unfiltered(kind: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    for at in range(len(line)):
        left, corner = (line[at - channels], above[at - channels]) if at >= channels else (0, 0)
        up = above[at]
        if kind == 4:
            guess = left + up - corner
            add = min((left, up, corner), key=lambda value: abs(guess - value))
        else:
            add = (0, left, up, (left + up) // 2)[kind]
        line[at] = (line[at] + add) & 255
    return line

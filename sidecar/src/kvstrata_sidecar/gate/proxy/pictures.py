"""Pixels of inline pictures, read from their headers.

A picture's bytes do not bound its size in the engine's memory: a PNG of 100 KB can have 178 million pixels, the
engine's own limit for one picture. The readers take the largest size that a decoder may take from a file with several.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata_sidecar.gate.http.errors import Reason, bad_request
from kvstrata_sidecar.gate.proxy.values import wrong

MAX_PIXELS = 36_000_000
"""Pixels of all pictures of a request."""

_HEADER_CHARACTERS = 64 * 1024
"""Base64 characters that are decoded first; a multiple of four."""

_JPEG_SIZES = frozenset({*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC})
_JPEG_SEGMENTS = _JPEG_SIZES | {0xC4, 0xCC, 0xDB, 0xDC, 0xDD, 0xDF, *range(0xE0, 0xF0), 0xFE}
"""Markers of segments before the first scan. Decoders disagree about the length of others."""

Size = tuple[int, int]


@dataclass(slots=True)
class PixelBudget:
    """The pixels that the pictures of one request may still have."""

    _left: int = MAX_PIXELS

    def take(self, encoded: object, where: str) -> None:
        """Charge a picture in base64. Raises Refusal if its size cannot be read or exceeds the rest."""
        if not isinstance(encoded, str):
            raise wrong(where, "a picture in base64")
        size = _size(_decoded(encoded[:_HEADER_CHARACTERS], where))
        if size is None and len(encoded) > _HEADER_CHARACTERS:
            size = _size(_decoded(encoded, where))
        if size is None or not all(size):
            raise wrong(where, "a PNG, JPEG, GIF, WebP or BMP picture")
        width, height = size
        self._left -= width * height
        if self._left < 0:
            raise bad_request(
                Reason.TOO_LARGE, f"the pictures of a request have at most {MAX_PIXELS} pixels in all", where
            )

    def take_url(self, url: str, where: str) -> None:
        self.take(_payload(url, where)[1], where)

    def take_frames(self, url: str, where: str) -> None:
        """Charge the pictures of a video that is a list of frames; other videos have no pictures to read."""
        kind, data = _payload(url, where)
        if kind == "video/jpeg":
            for frame in data.split(","):
                self.take(frame, where)


def _payload(url: str, where: str) -> tuple[str, str]:
    """Return the media type and the payload of a data URL, as the engine splits it."""
    head, _, data = url[len("data:") :].partition(",")
    kind, _, encoding = head.rpartition(";")
    if encoding != "base64":
        raise wrong(where, "a data: URL in base64")
    return kind.partition(";")[0].lower(), data


def _decoded(encoded: str, where: str) -> bytes:
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except ValueError:
        raise wrong(where, "a picture in base64") from None


def _size(data: bytes) -> Size | None:
    """Return width and height; None if `data` is of no known format, or ends too early."""
    for magic, reader in _READERS:
        if data.startswith(magic):
            try:
                return reader(data)
            except IndexError:
                return None
    return None


def _number(data: bytes, at: int, length: int, order: str) -> int:
    if at + length > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + length], "big" if order == ">" else "little")


def _png(data: bytes) -> Size:
    at, width, height = 8, 0, 0
    while data[at + 4 : at + 8] != b"IDAT":
        if data[at + 4 : at + 8] == b"IHDR":  # of several, a decoder takes the last
            width = max(width, _number(data, at + 8, 4, ">"))
            height = max(height, _number(data, at + 12, 4, ">"))
        at += 12 + _number(data, at, 4, ">")
    return width, height


def _jpeg(data: bytes) -> Size | None:
    at, width, height = 2, 0, 0
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0xDA:
            return width, height
        length = _number(data, at + 2, 2, ">")
        if marker not in _JPEG_SEGMENTS or length < 2:
            return None
        if marker in _JPEG_SIZES:  # of several, a decoder takes the last
            width = max(width, _number(data, at + 7, 2, ">"))
            height = max(height, _number(data, at + 5, 2, ">"))
        at += 2 + length
    return None


def _gif(data: bytes) -> Size | None:
    width, height = _number(data, 6, 2, "<"), _number(data, 8, 2, "<")
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while data[at] == 0x21:
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    if data[at] != 0x2C:
        return None
    # The first frame may exceed the screen; decoders enlarge it.
    left, top, wide, high = (_number(data, at + 1 + 2 * index, 2, "<") for index in range(4))
    return max(width, left + wide), max(height, top + high)


def _webp(data: bytes) -> Size | None:
    kind = data[8:16]
    if kind == b"WEBPVP8X":
        return _number(data, 24, 3, "<") + 1, _number(data, 27, 3, "<") + 1
    if kind == b"WEBPVP8L" and data[20] == 0x2F:
        bits = _number(data, 21, 4, "<")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"WEBPVP8 " and data[23:26] == b"\x9d\x01\x2a":
        return _number(data, 26, 2, "<") & 0x3FFF, _number(data, 28, 2, "<") & 0x3FFF
    return None


def _bmp(data: bytes) -> Size:
    if _number(data, 14, 4, "<") == 12:
        return _number(data, 18, 2, "<"), _number(data, 20, 2, "<")
    height = _number(data, 22, 4, "<")
    return _number(data, 18, 4, "<"), min(height, (1 << 32) - height)


_READERS: tuple[tuple[bytes, Callable[[bytes], Size | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)

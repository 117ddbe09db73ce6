"""Pixels of pictures: of each format, of several sizes in one file, of all pictures of a request."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from kvstrata_sidecar.gate.http.errors import Reason, Refusal
from kvstrata_sidecar.gate.proxy import bodies
from kvstrata_sidecar.gate.proxy.pictures import MAX_PIXELS, PixelBudget

from .stand_ins import PICTURE


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + b"csum"


def png(width: int, height: int, *more: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", b"x")


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def frame(width: int, height: int) -> bytes:
    return segment(0xC2, struct.pack(">BHHB", 8, height, width, 3) + b"x" * 9)


def jpeg(width: int, height: int, *more: bytes) -> bytes:
    return b"\xff\xd8" + segment(0xE0, b"JFIF\0") + b"".join(more) + frame(width, height) + segment(0xDA, b"x")


def gif(width: int, height: int, frame_width: int = 1, frame_height: int = 1) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"x" * 6
    return screen + b"!\xf9\x04xxxx\0" + b"," + struct.pack("<HHHHB", 0, 0, frame_width, frame_height, 0)


def webp(kind: bytes, data: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(data) + 12) + b"WEBP" + kind + struct.pack("<I", len(data)) + data


def extended_webp(width: int, height: int) -> bytes:
    return webp(b"VP8X", b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"))


def lossless_webp(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14))


def lossy_webp(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"xxx\x9d\x01\x2a" + struct.pack("<HH", width, height))


def bmp(width: int, height: int) -> bytes:
    return b"BM" + b"\0" * 12 + struct.pack("<Iii", 40, width, height)


def old_bmp(width: int, height: int) -> bytes:
    return b"BM" + b"\0" * 12 + struct.pack("<IHH", 12, width, height)


MAKERS = (png, jpeg, gif, extended_webp, lossless_webp, lossy_webp, bmp, old_bmp)


def charged(picture: bytes) -> int:
    """Return the pixels that a picture is charged with; raise Refusal if it is refused."""
    budget = PixelBudget()
    budget.take(base64.b64encode(picture).decode(), "here")
    return MAX_PIXELS - budget._left


def measured(picture: bytes) -> int | None:
    """Return the pixels of a picture, None if its size is not readable."""
    try:
        return charged(picture)
    except Refusal as refusal:
        if refusal.reason is not Reason.BAD_VALUE:
            raise
        return None


@pytest.mark.parametrize("make", MAKERS)
def test_a_picture_is_charged_with_width_times_height(make: Any) -> None:
    assert charged(make(300, 200)) == 60_000
    assert charged(make(6000, 6000)) == MAX_PIXELS
    with pytest.raises(Refusal) as refusal:
        charged(make(6000, 6001))
    assert (refusal.value.status, refusal.value.reason, refusal.value.param) == (400, Reason.TOO_LARGE, "here")


@pytest.mark.parametrize(
    "picture",
    [
        png(10, 10, chunk(b"IHDR", struct.pack(">II", 9000, 9000) + b"x" * 5)),
        jpeg(10, 10, frame(9000, 9000)),
        jpeg(10, 10, segment(0xDE, struct.pack(">BHHB", 8, 9000, 9000, 3))),
        gif(10, 10, 9000, 9000),
        bmp(9000, -9000),
    ],
    ids=["two headers", "two frames", "a hierarchy", "a frame beyond the screen", "top down"],
)
def test_the_largest_size_in_a_file_counts(picture: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        charged(picture)
    assert refusal.value.reason is Reason.TOO_LARGE


def test_a_size_behind_a_long_header_is_found() -> None:
    assert charged(png(30, 20, chunk(b"eXIf", b"x" * 200_000))) == 600
    assert charged(jpeg(30, 20, *[segment(0xE1, b"x" * 60_000)] * 3)) == 600


@pytest.mark.parametrize(
    "picture",
    [b"", b"II*\0", b"%PDF-1.7", b"<svg/>", b"\0\0\0\x20ftypavif", b"RIFF1234WAVE", png(0, 5),
     b"\xff\xd8\xff\xf0\0\0", jpeg(3, 2, segment(0xD0, b"xx")), jpeg(3, 2, b"\xff\xe1\0\0"), b"GIF89a", b"BM"],
)  # fmt: skip
def test_a_picture_without_a_readable_size_is_refused(picture: bytes) -> None:
    with pytest.raises(Refusal) as refusal:
        charged(picture)
    assert (refusal.value.status, refusal.value.reason) == (400, Reason.BAD_VALUE)


@pytest.mark.parametrize("make", MAKERS)
def test_a_picture_that_ends_in_its_header_is_refused(make: Any) -> None:
    whole = make(300, 200)
    for length in range(len(whole)):
        assert measured(whole[:length]) in (None, 60_000)


def part(picture: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}}


def block(picture: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    return {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}


@pytest.mark.parametrize(("endpoint", "wrap"), [(bodies.CHAT, part), (bodies.MESSAGES, block)], ids=["chat", "blocks"])
def test_all_pictures_of_a_request_share_one_bound(endpoint: bodies.Endpoint, wrap: Any) -> None:
    half = wrap(png(4000, 4500))
    bodies.rewrite(endpoint, {"messages": [{"role": "user", "content": [half]}] * 2})
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(endpoint, {"messages": [{"role": "user", "content": [half]}] * 2 + [
            {"role": "user", "content": [wrap(png(1, 1))]}]})  # fmt: skip
    assert refusal.value.reason is Reason.TOO_LARGE
    assert str(refusal.value.param).startswith("messages[2].content[0]")


@pytest.mark.parametrize(
    ("kind", "url", "passes"),
    [
        ("image_url", f"data:image/png;base64,{PICTURE}", True),
        ("image_url", f"data:image/png;charset=x;base64,{PICTURE}", True),
        ("image_url", f"data:image/png,{PICTURE}", False),
        ("image_url", "data:,", False),
        ("image_url", "data:image/png;base64," + PICTURE.replace("A", "A ", 1), False),
        ("video_url", "data:video/mp4;base64,AAAA", True),
        ("video_url", f"data:video/jpeg;base64,{PICTURE},{PICTURE}", True),
        ("video_url", f"data:video/JPEG;base64,{PICTURE},AAAA", False),
    ],
)
def test_a_data_url_is_split_as_the_engine_does(kind: str, url: str, passes: bool) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]}
    if passes:
        bodies.rewrite(bodies.CHAT, body)
        return
    with pytest.raises(Refusal) as refusal:
        bodies.rewrite(bodies.CHAT, body)
    assert refusal.value.param == f"messages[0].content[0].{kind}.url"

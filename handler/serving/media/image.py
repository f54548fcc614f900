"""Images: limits, and the size declared in a file header."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.serving.media.decoder import Decoder, FileRules, Size

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox import Work

_SEGMENTS = 256  # maximum number of segments in a JPEG before its size; a photo has about ten
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers of frame headers, which contain the size (ITU-T T.81, table B.1)."""
ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
"""JPEG markers that are not followed by a length."""


def read_size(data: bytes) -> tuple[int, int]:
    """Return the width and height from a JPEG, PNG, WebP or GIF header, or (0, 0) if the file has none.

    This takes only microseconds for any input. The decoder may find a different size.
    """
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data[:3] == b"\xff\xd8\xff":
        return _jpeg_size(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    return _webp_size(data[:30])


def _jpeg_size(data: bytes) -> tuple[int, int]:
    offset = 2
    for _ in range(_SEGMENTS):
        head = data[offset : offset + 9]
        if len(head) < 9 or head[0] != 0xFF:
            break
        if head[1] in _JPEG_SIZES:
            return int.from_bytes(head[7:9], "big"), int.from_bytes(head[5:7], "big")
        if head[1] == 0xFF:  # a fill byte
            offset += 1
        else:
            offset += 2 if head[1] in ALONE else 2 + int.from_bytes(head[2:4], "big")
    return 0, 0


def _webp_size(head: bytes) -> tuple[int, int]:
    """Return the width and height of a WebP image (RFC 9649)."""
    match head[8:16]:
        case b"WEBPVP8X":
            return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
        case b"WEBPVP8L":
            bits = int.from_bytes(head[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"WEBPVP8 ":
            return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    return 0, 0


def _rules(config: Config) -> FileRules:
    return FileRules(config.max_image_bytes, config.max_image_pixels, config.image_fetch_timeout)


def _pixels(size: Size, rules: FileRules) -> int:
    width, height = size
    if width * height > rules.max_units:
        limit = f"at most {rules.max_units} in all (option.max_image_pixels)"
        raise InvalidPayload(f"the image has {width} × {height} pixels; {limit}")
    return width * height


def _make() -> Work:
    from handler.serving.media.image_decoder import decode  # loads Pillow, only in the sandbox's process

    return decode


DECODER = Decoder(
    _rules, read_size, _pixels, unit_bytes=3, unit_memory=16, make=_make, packages=("PIL",), extra="images"
)

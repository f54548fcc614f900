"""Decode images by Pillow, within a sandbox's process: it does not block the server, and limits bound its time and
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from typing import Any

import PIL.Image
from PIL import GifImagePlugin, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from handler.core.errors import InvalidPayload, client_words
from handler.serving.media.decoder import LargerThanRead
from handler.serving.media.image import ALONE, read_size

# Ancillary data of image files: what decides no pixel is left out before Pillow sees, inflates and joins it.
#
# Pillow bounds some of it, of one chunk at a time, and reads all of it in Python.

_MAX_EXIF = 1 << 18  # bytes; a JPEG's segment has at most a quarter of that
_MOST = 1 << 16  # chunks of a PNG, and blocks of a GIF before its first image
_SEGMENTS, _SCANS = 4096, 500  # of a JPEG: before its first scan, and in all; a photo has some ten of each

_PNG = b"\x89PNG\r\n\x1a\n"
_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"))
_UPRIGHT = re.compile(rb"eXIf|iTXtXML:com\.adobe\.xmp\0|(?:tEXt|zTXt|iTXt)Raw profile type exif\0")
"""First bytes of the chunks that may give the orientation; Pillow reads no others for that."""

_GIF_BLOCK, _GRAPHIC_CONTROL = re.compile(rb"[!,;]"), b"\xf9"

_MARKER = re.compile(rb"\xff([^\x00\xff])")
_APP0, _APP1, _APP14, _APP15, _COMMENT, _SCAN = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE, 0xDA
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_APPLICATIONS = {_APP0: (b"JFIF",), _APP1: (_EXIF, _XMP), _APP14: (b"Adobe",)}
"""Markers of segments that affect colours or orientation, with their first bytes."""


def without_ancillary(data: memoryview) -> bytes | memoryview:
    """Return an image's file with only the parts that affect its pixels.

    Raises:
        InvalidPayload: it has more parts than any image; the message goes after the field's name.
    """
    head = bytes(data[:8])
    if head == _PNG:
        return b"".join(_png(data))
    if head.startswith(b"\xff\xd8\xff"):
        return b"".join(_jpeg(data))
    if head.startswith((b"GIF87a", b"GIF89a")):
        return b"".join(_gif(data))
    return data  # a WebP's chunks are read in C, and none is compressed


def check_exif(size: int) -> None:
    """Raise InvalidPayload if the image has more Exif data than is parsed."""
    if size > _MAX_EXIF:
        raise InvalidPayload(f"the image has {size} bytes of Exif; at most {_MAX_EXIF}")


def _png(data: memoryview) -> Iterator[memoryview]:
    yield data[:8]
    place, seen = 8, set[bytes]()
    for _ in range(_MOST):
        head = data[place : place + 8]
        if len(head) < 8:
            return
        length, name = int.from_bytes(head[:4], "big"), bytes(head[4:])
        end = place + 12 + length
        if name in _CHUNKS:
            yield data[place:end]
        elif name not in seen and _UPRIGHT.match(data[place + 4 : place + 40]):
            check_exif(0 if bytes(data[place + 8 : place + 11]) == b"XML" else length)
            seen.add(name)
            yield data[place:end]
        place = end
    raise InvalidPayload(f"the image has more than {_MOST} chunks")


def _jpeg(data: memoryview) -> Iterator[memoryview]:
    yield data[:2]
    place, exif = 2, 0
    for _ in range(_SEGMENTS):
        found = _MARKER.search(data, place)
        if found is None:
            return
        place, marker = found.start(), data[found.start() + 1]
        if marker == _SCAN:
            break
        end = place + 2 + (0 if marker in ALONE else int.from_bytes(data[place + 2 : place + 4], "big"))
        if _APP0 <= marker <= _APP15:
            start = bytes(data[place + 4 : place + 40])
            kept = start.startswith(_APPLICATIONS.get(marker, ()))
            check_exif(exif := exif + (end - place if start.startswith(_EXIF) else 0))
        else:
            kept = marker != _COMMENT
        if kept:
            yield data[place:end]
        place = end
    else:
        raise InvalidPayload(f"the image has more than {_SEGMENTS} segments")
    for number, _ in enumerate(re.finditer(rb"\xff\xda", data[place:])):
        if number == _SCANS:
            raise InvalidPayload(f"the image has more than {_SCANS} scans")
    yield data[place:]


def _gif(data: memoryview) -> Iterator[memoryview]:
    flags = data[10] if len(data) > 10 else 0
    place = 13 + ((6 << (flags & 7)) if flags & 0x80 else 0)
    yield data[:place]
    blocks = 0
    while (found := _GIF_BLOCK.search(data, place)) is not None and found[0] == b"!":
        start, place = found.start(), found.start() + 2
        while length := int.from_bytes(data[place : place + 1], "big"):
            place += 1 + length
            blocks = _counted(blocks)
        place += 1
        blocks = _counted(blocks)
        if data[start + 1 : start + 2] == _GRAPHIC_CONTROL:
            yield data[start:place]
    if found is not None:
        yield data[found.start() :]


def _counted(blocks: int) -> int:
    if blocks == _MOST:
        raise InvalidPayload(f"the image has more than {_MOST} blocks before its first frame")
    return blocks + 1


PIL.Image.MAX_IMAGE_PIXELS = None  # `decode` has a limit of its own

_FORMATS = [
    plugin.format
    for plugin in (
        JpegImagePlugin.JpegImageFile,
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
    )
]
"""No others are tried: Pillow's readers of rare formats see no client's bytes."""

_BACKGROUND = (255, 255, 255)
_PART = 1 << 20  # bytes


def decode(max_pixels: int, data: memoryview) -> Iterator[Any]:
    """Yield the size and digest of the first frame, as in `Medium`, then its pixels in parts.

    It decodes as vLLM does: upright by EXIF, transparent parts on white (vllm/multimodal/image.py).

    Args:
        max_pixels: width times height: a larger image's pixels are not decoded.

    Raises:
        LargerThanRead: it has more pixels.
        InvalidPayload: it is not an image of this type; the message goes after the field's name.
    """
    try:
        image = _open(max_pixels, data)
    except (LargerThanRead, InvalidPayload, MemoryError):
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidPayload("it is not JPEG, PNG, WebP or GIF") from None
    except Exception as error:  # whatever Pillow's readers raise on a broken file
        raise InvalidPayload(f"the image is broken: {client_words(str(error)) or 'it cannot be read'}") from None
    rgb = image.tobytes()
    digest = hashlib.sha256(b"%d %d " % image.size)
    digest.update(rgb)
    yield image.size, digest.hexdigest()
    for start in range(0, len(rgb), _PART):
        yield rgb[start : start + _PART]


def _open(max_pixels: int, data: memoryview) -> PIL.Image.Image:
    _check_size(read_size(bytes(data[:30])), max_pixels)  # Pillow allocates a WebP's pixels when it opens one
    with PIL.Image.open(io.BytesIO(without_ancillary(data)), formats=_FORMATS) as file:
        _check_size(file.size, max_pixels)
        check_exif(len(file.info.get("exif", b"")))  # a WebP's
        upright: PIL.Image.Image = file
        with contextlib.suppress(Exception):  # a broken EXIF does not spoil the image
            upright = ImageOps.exif_transpose(file)
        upright.load()
        return _rgb(upright)


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise LargerThanRead(*size)


def _rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    opaque = PIL.Image.new("RGB", image.size, _BACKGROUND)
    opaque.paste(image, mask=image.getchannel("A"))
    return opaque

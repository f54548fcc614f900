"""Decodes images with Pillow, in a sandboxed process with limited time and memory."""

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

# Ancillary data, which does not affect pixels, is removed from image files before Pillow reads, decompresses and joins
# it. Pillow itself limits only some of it, and only single chunks, and processes it in Python.

MAX_EXIF = 1 << 18  # maximum size of Exif data, in bytes; a JPEG's segment has at most a quarter of this
_MOST = 1 << 16  # maximum number of chunks in a PNG, and of blocks in a GIF before its first image
_SEGMENTS = 4096  # maximum number of segments in a JPEG before its first scan; a photo has about ten
_SCANS = 500  # maximum number of scans in a JPEG; a photo has about ten

_PNG = b"\x89PNG\r\n\x1a\n"
_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"))
_UPRIGHT = re.compile(rb"eXIf|iTXtXML:com\.adobe\.xmp\0|(?:tEXt|zTXt|iTXt)Raw profile type exif\0")
"""First bytes of the PNG chunks from which Pillow reads the orientation."""

_GIF_BLOCK, _GRAPHIC_CONTROL = re.compile(rb"[!,;]"), b"\xf9"

_MARKER = re.compile(rb"\xff([^\x00\xff])")
_APP0, _APP1, _APP14, _APP15, _COMMENT, _SCAN = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE, 0xDA
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
_APPLICATIONS = {_APP0: (b"JFIF",), _APP1: (_EXIF, _XMP), _APP14: (b"Adobe",)}
"""First bytes of the JPEG segments that affect colors or orientation, by marker."""


def without_ancillary(data: memoryview) -> bytes | memoryview:
    """Return an image file with only the parts that affect its pixels.

    Raises:
        InvalidPayload: the file has too many parts. The message is meant to follow the field name.
    """
    head = bytes(data[:8])
    if head == _PNG:
        return b"".join(_png(data))
    if head.startswith(b"\xff\xd8\xff"):
        return b"".join(_jpeg(data))
    if head.startswith((b"GIF87a", b"GIF89a")):
        return b"".join(_gif(data))
    return data  # chunks of a WebP are read by C code and not compressed


def check_exif(size: int) -> None:
    """Raise InvalidPayload if the image has too much Exif data."""
    if size > MAX_EXIF:
        raise InvalidPayload(f"the image has {size} bytes of Exif data; at most {MAX_EXIF} are allowed")


def _png(data: memoryview) -> Iterator[memoryview]:
    yield data[:8]
    offset, seen = 8, set[bytes]()
    for _ in range(_MOST):
        head = data[offset : offset + 8]
        if len(head) < 8:
            return
        length, name = int.from_bytes(head[:4], "big"), bytes(head[4:])
        end = offset + 12 + length
        if name in _CHUNKS:
            yield data[offset:end]
        elif name not in seen and _UPRIGHT.match(data[offset + 4 : offset + 40]):
            check_exif(0 if bytes(data[offset + 8 : offset + 11]) == b"XML" else length)
            seen.add(name)
            yield data[offset:end]
        offset = end
    raise InvalidPayload(f"the image has more than {_MOST} chunks")


def _jpeg(data: memoryview) -> Iterator[memoryview]:
    yield data[:2]
    offset, exif = 2, 0
    for _ in range(_SEGMENTS):
        marker_match = _MARKER.search(data, offset)
        if marker_match is None:
            return
        offset, marker = marker_match.start(), data[marker_match.start() + 1]
        if marker == _SCAN:
            break
        end = offset + 2 + (0 if marker in ALONE else int.from_bytes(data[offset + 2 : offset + 4], "big"))
        if _APP0 <= marker <= _APP15:
            start = bytes(data[offset + 4 : offset + 40])
            is_needed = start.startswith(_APPLICATIONS.get(marker, ()))
            check_exif(exif := exif + (end - offset if start.startswith(_EXIF) else 0))
        else:
            is_needed = marker != _COMMENT
        if is_needed:
            yield data[offset:end]
        offset = end
    else:
        raise InvalidPayload(f"the image has more than {_SEGMENTS} segments")
    _check_scans(data[offset:])
    yield data[offset:]


def _check_scans(data: memoryview) -> None:
    for number, _ in enumerate(re.finditer(rb"\xff\xda", data)):
        if number == _SCANS:
            raise InvalidPayload(f"the image has more than {_SCANS} scans")


def _gif(data: memoryview) -> Iterator[memoryview]:
    flags = data[10] if len(data) > 10 else 0
    offset = 13 + ((6 << (flags & 7)) if flags & 0x80 else 0)
    yield data[:offset]
    blocks = 0
    while (block := _GIF_BLOCK.search(data, offset)) is not None and block[0] == b"!":
        start, offset = block.start(), block.start() + 2
        while length := int.from_bytes(data[offset : offset + 1], "big"):
            offset += 1 + length
            blocks = _counted(blocks)
        offset += 1
        blocks = _counted(blocks)
        if data[start + 1 : start + 2] == _GRAPHIC_CONTROL:
            yield data[start:offset]
    if block is not None:
        yield data[block.start() :]


def _counted(blocks: int) -> int:
    if blocks == _MOST:
        raise InvalidPayload(f"the image has more than {_MOST} blocks before its first frame")
    return blocks + 1


PIL.Image.MAX_IMAGE_PIXELS = None  # `decode` has its own limit

_FORMATS = [
    plugin.format
    for plugin in (
        JpegImagePlugin.JpegImageFile,
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
    )
]
"""Formats that Pillow may try. Its readers for other formats must not process client data."""

_BACKGROUND = (255, 255, 255)
_PART = 1 << 20  # bytes


def decode(max_pixels: int, data: memoryview) -> Iterator[Any]:
    """Yield the size and digest of the first frame of an image, as in `Medium`, and then its pixels in parts.

    As in vLLM, the image is rotated according to its Exif data, and drawn on a white background
    (vllm/multimodal/image.py).

    Args:
        max_pixels: maximum number of pixels (width times height).

    Raises:
        LargerThanRead: the image has more pixels. The arguments are its size.
        InvalidPayload: the image is broken or not supported. The message is meant to follow the field name.
    """
    try:
        image = _open(max_pixels, data)
    except (LargerThanRead, InvalidPayload, MemoryError):
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidPayload("it is not JPEG, PNG, WebP or GIF") from None
    except Exception as error:  # Pillow may raise anything for a broken file
        raise InvalidPayload(f"the image is broken: {client_words(str(error)) or 'it cannot be read'}") from None
    rgb = image.tobytes()
    digest = hashlib.sha256(b"%d %d " % image.size)
    digest.update(rgb)
    yield image.size, digest.hexdigest()
    for start in range(0, len(rgb), _PART):
        yield rgb[start : start + _PART]


def _open(max_pixels: int, data: memoryview) -> PIL.Image.Image:
    _check_size(read_size(bytes(data[:30])), max_pixels)  # Pillow allocates the pixels of a WebP when it opens it
    with PIL.Image.open(io.BytesIO(without_ancillary(data)), formats=_FORMATS) as file:
        _check_size(file.size, max_pixels)
        check_exif(len(file.info.get("exif", b"")))  # for a WebP
        upright: PIL.Image.Image = file
        with contextlib.suppress(Exception):  # broken Exif data is ignored
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

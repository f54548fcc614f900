"""Decode images by Pillow, within a sandbox's process: nobody waits for it, and its limits bound time and memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from typing import Any

import PIL.Image
from PIL import GifImagePlugin, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from handler.core.errors import InvalidPayload
from handler.core.words import client_words
from handler.serving.media.decoder import LargerThanRead
from handler.serving.media.image.ancillary import check_exif, without_ancillary
from handler.serving.media.image.headers import read_size

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
    """Yield size and digest of the first frame, as in `Medium`, then its pixels in parts.

    It decodes as vLLM does: upright by EXIF, transparent parts on white (vllm/multimodal/image.py).

    Args:
        max_pixels: width times height: a larger image's pixels are not decoded.

    Raises:
        LargerThanRead: it has more pixels.
        InvalidPayload: it is no such image; the message goes after the field's name.
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

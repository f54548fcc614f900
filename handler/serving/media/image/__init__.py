"""Images: their sizes by their files' headers, and their pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.serving.media.decoder import Decoder, Size
from handler.serving.media.image.headers import read_size

if TYPE_CHECKING:
    from handler.engines.process.sandbox_tasks import Work
    from handler.serving.media.rules import FileRules


def _pixels(size: Size, rules: FileRules) -> int:
    width, height = size
    if width * height > rules.max_units:
        limit = f"at most {rules.max_units} in all (option.max_image_pixels)"
        raise InvalidPayload(f"the image has {width} × {height} pixels; {limit}")
    return width * height


def _make() -> Work:
    from handler.serving.media.image.decode import decode  # Pillow, in the process only

    return decode


DECODER = Decoder(read_size, _pixels, unit_bytes=3, unit_memory=16, make=_make, packages=("PIL",), extra="images")

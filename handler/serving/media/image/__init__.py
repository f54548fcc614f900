"""Images: their sizes by their files' headers, and their pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.serving.media.decoder import Decoder, FileRules, Size
from handler.serving.media.image.headers import read_size

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox_tasks import Work


def _rules(config: Config) -> FileRules:
    return FileRules(config.max_image_bytes, config.max_image_pixels, config.image_fetch_timeout)


def _pixels(size: Size, rules: FileRules) -> int:
    width, height = size
    if width * height > rules.max_units:
        limit = f"at most {rules.max_units} in all (option.max_image_pixels)"
        raise InvalidPayload(f"the image has {width} × {height} pixels; {limit}")
    return width * height


def _make() -> Work:
    from handler.serving.media.image.decode import decode  # Pillow, in the process only

    return decode


DECODER = Decoder(
    _rules, read_size, _pixels, unit_bytes=3, unit_memory=16, make=_make, packages=("PIL",), extra="images"
)

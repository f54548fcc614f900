"""Images as Pillow's, which vLLM and TensorRT-LLM take."""

from __future__ import annotations

from typing import Any

from handler.core.media import Medium


def pillow_image(medium: Medium) -> Any:
    from PIL import Image

    width, height = medium.size
    return Image.frombytes("RGB", (width, height), medium.data)

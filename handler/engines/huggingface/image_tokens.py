"""Tokens of images: how many a model computes for an image, by its configuration files.

The formulas are those of transformers' processors: `smart_resize` in models/qwen2_vl/image_processing_qwen2_vl.py, and
models/llava/processing_llava.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.core.media import MediaTokens
from handler.engines.huggingface.media_config import read_tokens

_VISION_CONFIGS = ("vision_config", "vision_tower", "visual", "mm_vision_tower")
_MAX_RATIO = 200  # of an image's sides: Qwen2-VL's


@dataclass(frozen=True)
class LlavaTokens:
    """LLaVA: all images are resized to one square.

    Attributes:
        placeholder: id of an image's placeholder.
        text: its text.
        number: tokens of an image.
    """

    placeholder: int
    text: str
    number: int

    def count(self, size: Sequence[int]) -> int:
        return self.number


@dataclass(frozen=True)
class QwenTokens:
    """Qwen2-VL and Qwen2.5-VL: the more pixels, the more tokens, within two limits.

    Attributes:
        placeholder: id of an image's placeholder.
        text: the placeholder's text, with the marks around it.
        side: pixels of a token's side.
        least, most: pixels of an image, after it was resized.
    """

    placeholder: int
    text: str
    side: int
    least: int
    most: int

    def count(self, size: Sequence[int]) -> int:
        width, height = size
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise ValueError(f"the model takes no image with a side over {_MAX_RATIO} times as long as the other")
        rows, columns = round(height / self.side), round(width / self.side)
        if rows * columns * self.side**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / scale / self.side))
            columns = max(1, math.floor(width / scale / self.side))
        elif rows * columns * self.side**2 < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * scale / self.side), math.ceil(width * scale / self.side)
        return rows * columns


def read_image_tokens(model: Path | None) -> MediaTokens | str:
    """Return how a model counts the tokens of images, or the reason why it takes none.

    Args:
        model: a Hugging Face directory, or what was made of one.
    """
    return read_tokens(model, "image", _read, _VISION_CONFIGS)


def no_images(model: Path | None) -> str:
    """Return the reason why a model takes no images; "" where it does."""
    found = read_image_tokens(model)
    return found if isinstance(found, str) else ""


def _read(config: Mapping[str, Any], model: Path) -> MediaTokens | str | None:
    kind = config.get("model_type")
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return _qwen(config, _processor(model))
    return _llava(config) if kind == "llava" else None


def _qwen(config: Mapping[str, Any], processor: Mapping[str, Any]) -> MediaTokens | str:
    vision, size = config.get("vision_config") or {}, processor.get("size") or {}
    placeholder = config.get("image_token_id", 151655)
    patch = processor.get("patch_size") or vision.get("patch_size") or 14
    merge = processor.get("merge_size") or vision.get("spatial_merge_size") or 2
    least = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return QwenTokens(placeholder, "<|vision_start|><|image_pad|><|vision_end|>", patch * merge, least, most)


def _llava(config: Mapping[str, Any]) -> MediaTokens | str:
    vision = config.get("vision_config") or {}
    kind = vision.get("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        return f"images are not supported for LLaVA with vision_config.model_type {kind} (config.json)"
    placeholder = config.get("image_token_index", config.get("image_token_id", 32000))
    number = (vision.get("image_size", 336) // vision.get("patch_size", 14)) ** 2
    number += kind == "clip_vision_model"  # its class token
    number -= config.get("vision_feature_select_strategy", "default") == "default"
    return LlavaTokens(placeholder, "<image>", number)


def _processor(model: Path) -> Mapping[str, Any]:
    """Read the image processor's configuration, from either of the files in which transformers keeps it."""
    nested = model_files.read_json(model / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else model_files.read_json(model / "preprocessor_config.json")

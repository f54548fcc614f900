"""The input processor of Qwen2-VL and Qwen2.5-VL (modeling_qwen2vl.py and inputs/registry.py of 1.0 to 1.3).

The first image that it cannot hash turns hashing off for its whole life, and says so in the log alone: from then on the
KV cache takes one image for another, where their prompts have the same ids.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensorrt_llm._double.api import MANNERS

FAMILIES = ("qwen2_vl", "qwen2_5_vl")


class Processed(NamedTuple):
    """A prompt.

    Attributes:
        ids: what the result calls them; before 1.3 an image's are beyond the vocabulary.
        tokens: the same, in the vocabulary.
        keys: what the KV cache knows each position by.
        images: where each image begins, and the pixels that the model sees there.
        faulty: it has more images than places for them, which the model meets in a step.
    """

    ids: list[int]
    tokens: list[int]
    keys: list[Any]
    images: tuple[tuple[int, str], ...]
    faulty: bool = False


class Processor:
    def __init__(self, directory: Path, tokenizer: Any) -> None:
        config = json.loads((directory / "config.json").read_text())
        self._tokenizer, self._vocabulary = tokenizer, config["vocab_size"]
        self._pad: int = config["image_token_id"]
        self._text: str = tokenizer.decode([self._pad])
        file = directory / "preprocessor_config.json"
        sizes = json.loads(file.read_text()) if file.is_file() else {}
        self._least, self._most = sizes.get("min_pixels", 56 * 56), sizes.get("max_pixels", 28 * 28 * 1280)
        self.hashes: bool | None = None  # unknown before the first image

    def __call__(self, text: str, data: Any, arguments: Any) -> Processed:
        """
        Args:
            data: multi_modal_data.
            arguments: mm_processor_kwargs, which must not be None.
        """
        if not data:
            ids = self._tokenizer(text)["input_ids"]
            return Processed(ids, ids, ids, ())
        if self.hashes is not False:
            try:
                found = self._hashed(text, data, arguments)
            except Exception:
                if self.hashes:
                    raise
                self.hashes = False  # with a warning
            else:
                self.hashes = True
                return found
        return self._plain(text, data, arguments)

    def _plain(self, text: str, data: Any, arguments: Any) -> Processed:
        dict(**arguments)
        images = data["image"]
        pieces, counts = text.split(self._text), [self._count(image) for image in images]
        whole = pieces[0]
        for at, piece in enumerate(pieces[1:]):
            whole += self._text * counts[at] + piece  # IndexError: there are not as many images
        tokens = self._tokenizer(whole)["input_ids"]
        shown = self._pad if MANNERS.release >= (1, 3) else self._vocabulary + 1
        ids = [shown if id == self._pad else id for id in tokens]
        starts, at = [], -1
        for count in counts[: len(pieces) - 1]:
            at = tokens.index(self._pad, at + 1)
            starts.append(at)
            at += count - 1
        seen = [_pixels(image) for image in images]
        return Processed(
            ids, tokens, list(ids), tuple(zip(starts, seen, strict=False)), faulty=len(starts) != len(images)
        )

    def _hashed(self, text: str, data: Any, arguments: Any) -> Processed:
        """Name an image's positions by its bytes, whatever its width is (`serialize_item` in inputs/multimodal.py)."""
        hashes = [hashlib.blake2b(image.convert("RGBA").tobytes()).hexdigest() for image in data["image"]]
        found = self._plain(text, data, arguments)
        counts = [self._count(image) for image in data["image"]]
        if found.tokens.count(self._pad) != sum(counts):
            raise ValueError("Mismatch between the number of multimodal tokens and placeholders")
        for (start, _), name, count in zip(found.images, hashes, counts, strict=True):
            found.keys[start : start + count] = [(name, at) for at in range(count)]
        return found

    def _count(self, image: Any) -> int:
        """`smart_resize` of transformers' models/qwen2_vl/image_processing_qwen2_vl.py, in tokens."""
        height: int = image.height
        width: int = image.width
        if max(height, width) / min(height, width) > 200:
            raise ValueError("absolute aspect ratio must be smaller than 200")
        sides = [round(side / 28) * 28 for side in (height, width)]
        if math.prod(sides) > self._most:
            scale = math.sqrt(height * width / self._most)
            sides = [max(28, math.floor(side / scale / 28) * 28) for side in (height, width)]
        elif math.prod(sides) < self._least:
            scale = math.sqrt(self._least / (height * width))
            sides = [math.ceil(side * scale / 28) * 28 for side in (height, width)]
        return math.prod(sides) // 28**2


def load(directory: Path, tokenizer: Any) -> Processor | None:
    """None for a model of texts, whose images nobody looks at."""
    config = json.loads((directory / "config.json").read_text())
    return Processor(directory, tokenizer) if config.get("model_type") in FAMILIES else None


def reused(images: Sequence[tuple[int, str]], others: Sequence[tuple[int, str]], size: int) -> tuple[str, ...]:
    """The pixels that the model computes with, where the cache has the first `size` positions of another prompt."""
    cached = dict(others)
    return tuple(cached.get(start, pixels) if start < size else pixels for start, pixels in images)


def _pixels(image: Any) -> str:
    return hashlib.blake2b(repr((image.width, image.height)).encode() + image.convert("RGB").tobytes()).hexdigest()

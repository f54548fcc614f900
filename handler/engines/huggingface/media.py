"""Media in prompts for Hugging Face models: the number and the positions of the tokens of an image or audio clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.core.media import MEDIA, SAMPLE_RATE, FixedTokens, MediaTokens, Medium
from handler.engines.base import NO_MEDIA

Read = Callable[[Mapping[str, Any], Path], MediaTokens | str | None]
"""Type of a function that returns a model's token counter for one kind of media, or the reason why the model does not
accept these media, or None if the model type is unknown.
"""


def read_tokens(model: Path | None, kind: str) -> MediaTokens | str:
    """Return the model's token counter for media of one kind, or the reason why the model does not accept such media.

    Args:
        model: a Hugging Face directory, or a directory converted from one.
        kind: a key of `MEDIA`.
    """
    if model is None or not model.is_dir():
        return NO_MEDIA
    config = model_files.read_json(model / "config.json")
    read, parts = _READERS[kind]
    if (tokens := read(config, model)) is not None:
        return tokens
    if config.keys().isdisjoint(parts):
        return NO_MEDIA
    return f"{MEDIA[kind]} are not supported for model_type {config.get('model_type')} (config.json)"


# -- tokens of images: how many tokens a model needs for an image, according to its configuration files ----------------
# The formulas are those of transformers' processors: `smart_resize` in models/qwen2_vl/image_processing_qwen2_vl.py,
# and models/llava/processing_llava.py.

_VISION_CONFIGS = ("vision_config", "vision_tower", "visual", "mm_vision_tower")
_MAX_RATIO = 200  # of an image's sides; Qwen2-VL's limit


@dataclass(frozen=True)
class QwenTokens:
    """Counts image tokens for Qwen2-VL and Qwen2.5-VL. The count grows with the number of pixels, between two limits.

    Attributes:
        placeholder: id of an image's placeholder.
        text: text of the placeholder, including the tokens around it.
        side: width and height, in pixels, of the square that corresponds to one token.
        least, most: minimum and maximum number of pixels of a resized image.
    """

    placeholder: int
    text: str
    side: int
    least: int
    most: int

    def count(self, size: Sequence[int]) -> int:
        width, height = size
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise ValueError(
                f"the model does not accept an image with one side more than {_MAX_RATIO} times as long as the other"
            )
        rows, columns = round(height / self.side), round(width / self.side)
        if rows * columns * self.side**2 > self.most:
            scale = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / scale / self.side))
            columns = max(1, math.floor(width / scale / self.side))
        elif rows * columns * self.side**2 < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * scale / self.side), math.ceil(width * scale / self.side)
        return rows * columns


def no_images(model: Path | None) -> str:
    """Return the reason why a model does not accept images; "" if it does."""
    tokens = read_tokens(model, "image")
    return tokens if isinstance(tokens, str) else ""


def _read_image(config: Mapping[str, Any], model: Path) -> MediaTokens | str | None:
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
    return FixedTokens(placeholder, "<image>", number)


def _processor(model: Path) -> Mapping[str, Any]:
    """Read the image processor configuration from either of the two files in which transformers stores it."""
    nested = model_files.read_json(model / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else model_files.read_json(model / "preprocessor_config.json")


# -- tokens of audio: how many tokens a model needs for an audio file, according to its configuration files ------------
# The formula is that of transformers' models/qwen2_audio/processing_qwen2_audio.py.

_HOP = 160  # samples per frame of the spectrogram, as in Whisper
_MOST = 30  # seconds; transformers truncates longer clips
_AUDIO_CONFIGS = ("audio_config", "audio_encoder", "audio_processor", "speech_config", "encoder_config")


@dataclass(frozen=True)
class QwenAudioTokens:
    """Counts audio tokens for Qwen2-Audio, which needs one token for every 40 ms.

    Attributes:
        placeholder: id of the placeholder for audio.
        text: text of the placeholder, including the tokens around it.
    """

    placeholder: int
    text: str = "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def count(self, size: Sequence[int]) -> int:
        (samples,) = size
        if samples > _MOST * SAMPLE_RATE:
            raise ValueError(f"the audio has {samples / SAMPLE_RATE:.6g} s; the model accepts at most {_MOST} s")
        frames = -(-samples // _HOP)
        if (tokens := ((frames - 1) // 2 - 1) // 2 + 1) < 1:
            raise ValueError(f"the audio has {samples / SAMPLE_RATE:.6g} s, which is too short for the model")
        return tokens


def _read_audio(config: Mapping[str, Any], model: Path) -> MediaTokens | None:
    if config.get("model_type") != "qwen2_audio":
        return None
    return QwenAudioTokens(config.get("audio_token_index", config.get("audio_token_id", 151646)))


_READERS: Mapping[str, tuple[Read, Collection[str]]] = {
    "image": (_read_image, _VISION_CONFIGS),
    "audio": (_read_audio, _AUDIO_CONFIGS),
}
"""Maps each kind of media to a function that reads the configuration of supported model types, and to fields that
config.json contains if the model accepts these media.
"""


def media_tokens(model: Path | None) -> dict[str, MediaTokens]:
    """Return the model's token counters for the kinds of media that it accepts, by kind.

    Args:
        model: a Hugging Face directory, or a directory converted from one.
    """
    by_kind = {kind: read_tokens(model, kind) for kind in _READERS}
    return {kind: tokens for kind, tokens in by_kind.items() if not isinstance(tokens, str)}


def no_media(model: Path | None) -> dict[str, str]:
    """Return, for each kind of media, the reason why a model does not accept it; "" if it does."""
    by_kind = {kind: read_tokens(model, kind) for kind in _READERS}
    reasons = {kind: tokens if isinstance(tokens, str) else "" for kind, tokens in by_kind.items()}
    text_only = all(reason == NO_MEDIA for reason in reasons.values())
    return {
        kind: f"the model accepts no {MEDIA[kind]}" if reason == NO_MEDIA and not text_only else reason
        for kind, reason in reasons.items()
    }


def expand(ids: Sequence[int], counts: Mapping[str, Sequence[int]], tokens: Mapping[str, MediaTokens]) -> list[int]:
    """Repeat each placeholder as many times as its medium has tokens.

    Args:
        counts: number of tokens of each medium, by kind.

    Raises:
        ValueError: the number of placeholders of a kind differs from the number of media.
    """
    result = list(ids)
    for kind, numbers in counts.items():
        placeholder = tokens[kind].placeholder
        count = result.count(placeholder)
        if count != len(numbers):
            raise ValueError(f"the chat template writes {count} placeholders for {len(numbers)} {MEDIA[kind]}")
        left = iter(numbers)
        result = [id for token in result for id in ([placeholder] * next(left) if token == placeholder else [token])]
    return result


def collapse(ids: Sequence[int], media: Sequence[Medium], tokens: Mapping[str, MediaTokens]) -> list[int]:
    """Reduce each medium's repeated placeholders to a single placeholder. This is the inverse of `expand`.

    Raises:
        ValueError: a medium does not have as many placeholders as tokens.
    """
    for kind, kind_tokens in tokens.items():
        counts = [kind_tokens.count(medium.size) for medium in media if medium.kind == kind]
        ids = _collapse(ids, kind_tokens.placeholder, counts, MEDIA[kind])
    return list(ids)


def _collapse(ids: Sequence[int], placeholder: int, counts: Sequence[int], word: str) -> list[int]:
    wrong = ValueError(f"the number of placeholders in the prompt differs from the number of tokens of its {word}")
    result: list[int] = []
    left, position = list(counts), 0
    while position < len(ids):
        id = ids[position]
        size = left.pop(0) if id == placeholder and left else 1
        if id == placeholder and list(ids[position : position + size]) != [id] * size:
            raise wrong
        result.append(id)
        position += size
    if left or result.count(placeholder) != len(counts):
        raise wrong
    return result


def prompt_text(
    ids: Sequence[int], text: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> str:
    """Return a prompt's text, for an engine that does not accept ids.

    If `text` covers only some of the ids, for example because reasoning follows, the text of the other ids is appended.

    Args:
        text: text of the prompt or of its beginning; may be empty.
        encode, decode: the engine's functions. They preserve the special tokens in the text, and do not add any.

    Raises:
        ValueError: the engine would encode the text as different ids.
    """
    text_ids = encode(text) if text else []
    if list(ids[: len(text_ids)]) == text_ids:
        text += decode(list(ids[len(text_ids) :]))
        if encode(text) == list(ids):
            return text
    raise ValueError(
        "the engine accepts prompts of vision models only as text, and no text has exactly the tokens of this prompt "
        "(it was sent as token ids, was truncated, or continues after reasoning)"
    )


def pillow_image(medium: Medium) -> Any:
    """Convert an image to a Pillow image, which vLLM and TensorRT-LLM accept."""
    from PIL import Image

    width, height = medium.size
    return Image.frombytes("RGB", (width, height), medium.data)

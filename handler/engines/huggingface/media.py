"""Media in prompts of Hugging Face models: how many tokens an image or a clip has, and their positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.core.media import MEDIA, SAMPLE_RATE, MediaTokens, Medium
from handler.engines.base import NO_MEDIA

Read = Callable[[Mapping[str, Any], Path], MediaTokens | str | None]
"""Returns how a model counts a medium's tokens, or why it accepts none; None if its type is unknown."""


def read_tokens(model: Path | None, kind: str, read: Read, parts: Collection[str]) -> MediaTokens | str:
    """Return how a model counts the tokens of media of a kind, or the reason why it accepts none.

    Args:
        model: a Hugging Face directory, or what was made of one.
        parts: fields of config.json that models with such media have.
    """
    if model is None or not model.is_dir():
        return NO_MEDIA
    config = model_files.read_json(model / "config.json")
    if (found := read(config, model)) is not None:
        return found
    if config.keys().isdisjoint(parts):
        return NO_MEDIA
    return f"{MEDIA[kind]} are not supported for model_type {config.get('model_type')} (config.json)"


# -- tokens of images: how many a model computes for an image, by its configuration files ------------------------------
# The formulas are those of transformers' processors: `smart_resize` in models/qwen2_vl/image_processing_qwen2_vl.py,
# and models/llava/processing_llava.py.

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
            raise ValueError(
                f"the model does not accept an image with one side over {_MAX_RATIO} times as long as the other"
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


def read_image_tokens(model: Path | None) -> MediaTokens | str:
    """Return how a model counts the tokens of images, or the reason why it accepts none.

    Args:
        model: a Hugging Face directory, or what was made of one.
    """
    return read_tokens(model, "image", _read, _VISION_CONFIGS)


def no_images(model: Path | None) -> str:
    """Return the reason why a model accepts no images; "" if it does."""
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


# -- tokens of audio clips: how many a model computes for a clip, by its configuration files ---------------------------
# The formula is that of transformers' models/qwen2_audio/processing_qwen2_audio.py.

_HOP = 160  # samples of a frame of the spectrogram: Whisper's
_MOST = 30  # seconds: transformers cuts off what is longer
_AUDIO_CONFIGS = ("audio_config", "audio_encoder", "audio_processor", "speech_config", "encoder_config")


@dataclass(frozen=True)
class QwenAudioTokens:
    """Qwen2-Audio: a token every 40 ms.

    Attributes:
        placeholder: id of a clip's placeholder.
        text: the placeholder's text, with the marks around it.
    """

    placeholder: int
    text: str = "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def count(self, size: Sequence[int]) -> int:
        (samples,) = size
        if samples > _MOST * SAMPLE_RATE:
            raise ValueError(f"the audio has {samples / SAMPLE_RATE:.6g} s; the model takes {_MOST} at most")
        frames = -(-samples // _HOP)
        if (tokens := ((frames - 1) // 2 - 1) // 2 + 1) < 1:
            raise ValueError(f"the audio has {samples / SAMPLE_RATE:.6g} s, which is too short for the model")
        return tokens


def read_audio_tokens(model: Path | None) -> MediaTokens | str:
    """Return how a model counts the tokens of audio clips, or the reason why it accepts none.

    Args:
        model: a Hugging Face directory, or what was made of one.
    """
    return read_tokens(model, "audio", _read_audio, _AUDIO_CONFIGS)


def _read_audio(config: Mapping[str, Any], model: Path) -> MediaTokens | None:
    if config.get("model_type") != "qwen2_audio":
        return None
    return QwenAudioTokens(config.get("audio_token_index", config.get("audio_token_id", 151646)))


_READERS: dict[str, Callable[[Path | None], MediaTokens | str]] = {
    "image": read_image_tokens,
    "audio": read_audio_tokens,
}
"""By kind: return how a model counts the tokens of such media, or the reason why it accepts none."""


def media_tokens(model: Path | None) -> dict[str, MediaTokens]:
    """Return how a model counts the tokens of the media that it takes, by kind.

    Args:
        model: a Hugging Face directory, or what was made of one.
    """
    found = {kind: read(model) for kind, read in _READERS.items()}
    return {kind: tokens for kind, tokens in found.items() if not isinstance(tokens, str)}


def no_media(model: Path | None) -> dict[str, str]:
    """Return, by kind, why a model accepts no such media; "" if it does."""
    found = {kind: read(model) for kind, read in _READERS.items()}
    reasons = {kind: tokens if isinstance(tokens, str) else "" for kind, tokens in found.items()}
    text_only = all(reason == NO_MEDIA for reason in reasons.values())
    return {
        kind: f"the model takes no {MEDIA[kind]}" if reason == NO_MEDIA and not text_only else reason
        for kind, reason in reasons.items()
    }


def expand(ids: Sequence[int], counts: Mapping[str, Sequence[int]], tokens: Mapping[str, MediaTokens]) -> list[int]:
    """Repeat each placeholder as often as its medium has tokens.

    Args:
        counts: tokens of each medium, by kind.

    Raises:
        ValueError: there are not as many placeholders of a kind as media.
    """
    result = list(ids)
    for kind, numbers in counts.items():
        placeholder = tokens[kind].placeholder
        found = result.count(placeholder)
        if found != len(numbers):
            raise ValueError(f"the chat template makes {found} placeholders for {len(numbers)} {MEDIA[kind]}")
        left = iter(numbers)
        result = [id for given in result for id in ([placeholder] * next(left) if given == placeholder else [given])]
    return result


def collapse(ids: Sequence[int], media: Sequence[Medium], tokens: Mapping[str, MediaTokens]) -> list[int]:
    """Undo `expand`.

    Raises:
        ValueError: a placeholder is not repeated as often as its medium has tokens.
    """
    for kind, one in tokens.items():
        counts = [one.count(medium.size) for medium in media if medium.kind == kind]
        ids = _collapse(ids, one.placeholder, counts, MEDIA[kind])
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
    """Return a prompt's text for an engine that takes no ids: `text`, then that of later ids, such as a thought's.

    Args:
        text: of the prompt, or of its beginning, or "".
        encode, decode: the engine's, with special tokens in the text and none added.

    Raises:
        ValueError: the engine would compute other ids.
    """
    known = encode(text) if text else []
    if list(ids[: len(known)]) == known:
        text += decode(list(ids[len(known) :]))
        if encode(text) == list(ids):
            return text
    raise ValueError(
        "the engine takes vision models' prompts as text, and no text has exactly this prompt's tokens "
        "(a prompt of ids, a cut prompt, or what follows a thought)"
    )


def pillow_image(medium: Medium) -> Any:
    """Return an image as Pillow's, which vLLM and TensorRT-LLM take."""
    from PIL import Image

    width, height = medium.size
    return Image.frombytes("RGB", (width, height), medium.data)

"""Tokens of audio clips: how many a model computes for a clip, by its configuration files.

The formula is that of transformers' models/qwen2_audio/processing_qwen2_audio.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from handler.config import model_files
from handler.core.media import SAMPLE_RATE, MediaTokens
from handler.engines.base import NO_MEDIA

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
    """Return how a model counts the tokens of audio clips, or the reason why it takes none.

    Args:
        model: a Hugging Face directory, or what was made of one.
    """
    if model is None or not model.is_dir():
        return NO_MEDIA
    config = model_files.read_json(model / "config.json")
    kind = config.get("model_type")
    if kind == "qwen2_audio":
        return QwenAudioTokens(config.get("audio_token_index", config.get("audio_token_id", 151646)))
    if any(name in config for name in _AUDIO_CONFIGS):
        return f"audio clips are not supported for model_type {kind} (config.json)"
    return NO_MEDIA

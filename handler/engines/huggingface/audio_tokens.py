"""Tokens of audio clips: how many a model computes for a clip, by its configuration files.

The formula is that of transformers' models/qwen2_audio/processing_qwen2_audio.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.core.media import SAMPLE_RATE, MediaTokens
from handler.engines.huggingface.media_config import read_tokens

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
    return read_tokens(model, "audio", _read, _AUDIO_CONFIGS)


def _read(config: Mapping[str, Any], model: Path) -> MediaTokens | None:
    if config.get("model_type") != "qwen2_audio":
        return None
    return QwenAudioTokens(config.get("audio_token_index", config.get("audio_token_id", 151646)))

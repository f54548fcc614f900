"""Audio clips: their lengths by their files' headers, and their samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.core.media import SAMPLE_RATE
from handler.serving.media.audio.headers import num_samples, read_size
from handler.serving.media.decoder import Decoder, FileRules, Size

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox_tasks import Work


def _rules(config: Config) -> FileRules:
    return FileRules(config.max_audio_bytes, config.max_audio_seconds * SAMPLE_RATE, config.audio_fetch_timeout)


def _samples(size: Size, rules: FileRules) -> int:
    if not any(size):
        return 0  # an MP3's or Ogg's, which the decoder finds
    samples = num_samples(size)
    if samples > rules.max_units:
        limit = f"at most {rules.max_units // SAMPLE_RATE} s (option.max_audio_seconds)"
        raise InvalidPayload(f"the audio has {size[0] / size[1]:.6g} s; {limit}")
    return samples


def _make() -> Work:
    from handler.serving.media.audio.decode import decode  # libsndfile, in the process only

    return decode


DECODER = Decoder(
    _rules,
    read_size,
    _samples,
    unit_bytes=4,
    unit_memory=12,
    make=_make,
    packages=("soundfile", "soxr", "python_multipart"),
    extra="audio",
)

"""Decodes audio with libsndfile, in a sandboxed process with limited time and memory."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy
import soundfile
import soxr

from handler.core.errors import InvalidPayload
from handler.core.media import SAMPLE_RATE
from handler.serving.media.audio import check_pages, check_tags, num_samples
from handler.serving.media.decoder import LargerThanRead

_HEADS = ((b"RIFF", "WAV"), (b"fLaC", "FLAC"), (b"OggS", "OGG"), (b"ID3", "MP3"), (b"\xff", "MP3"))
"""First bytes of supported files, and the format that libsndfile must detect for each. Other files are refused before
libsndfile reads them.
"""

_ENCODINGS = frozenset({
    "PCM_U8", "PCM_S8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW",
    "VORBIS", "OPUS", "MPEG_LAYER_III",
})  # fmt: skip

_BLOCK = 1 << 15  # samples per channel to read at once


def decode(max_samples: int, data: memoryview) -> Iterator[Any]:
    """Yield the size and digest of an audio file, as in `Medium`, and then its samples in parts.

    The channels are averaged as in vLLM, and the result is resampled with soxr as in librosa.

    Args:
        max_samples: maximum number of samples after the conversion.

    Raises:
        LargerThanRead: the audio has more samples. The arguments are its size, as returned by `read_size`.
        InvalidPayload: the audio is broken or not supported. The message is meant to follow the field name.
    """
    content = bytes(data)
    kind = next((kind for head, kind in _HEADS if content.startswith(head)), "")
    if not kind:
        raise InvalidPayload("it is not WAV, FLAC, MP3 or Ogg (Vorbis, Opus)")
    if kind == "OGG":
        check_pages(content)
    if kind == "MP3":
        check_tags(content)
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format.removesuffix("EX") != kind or file.subtype not in _ENCODINGS:
                raise InvalidPayload(f"its encoding is not supported: {file.format} of {file.subtype}")
            length = _count(file) if kind == "MP3" and not max_samples else max(file.frames, 0)
            size = (length, file.samplerate, file.channels)
            if num_samples(size) > max_samples and not (kind == "MP3" and max_samples):
                raise LargerThanRead(*size)
            parts = list(_parts(file, size, max_samples, exact=kind != "MP3"))
    except soundfile.LibsndfileError as error:
        raise InvalidPayload(f"the audio is broken: {error.error_string.rstrip('.')}") from None
    found = sum(map(len, parts))
    digest = hashlib.sha256(b"audio %d " % found)
    for part in parts:
        digest.update(part)
    yield (found,), digest.hexdigest()
    for part in parts:
        yield part.tobytes()


def _blocks(file: Any) -> Iterator[Any]:
    """Yield the samples in arrays of shape [samples, channels]."""
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        yield block


def _count(file: Any) -> int:
    """Count the samples of an MP3 by decoding it. Without a length in the header, libsndfile only estimates it."""
    num_samples((1, file.samplerate, file.channels))
    return sum(map(len, _blocks(file)))


def _parts(file: Any, size: tuple[int, int, int], max_samples: int, *, exact: bool) -> Iterator[Any]:
    """Yield the converted samples in arrays.

    Args:
        exact: whether `size` is exact, so that the file must contain exactly this number of samples.
    """
    length, rate, _ = size
    stream = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
    most = length if exact else max_samples * rate // SAMPLE_RATE + 1
    done = 0
    for block in _blocks(file):
        done += len(block)
        if done > most:
            raise InvalidPayload("the audio is broken: it is longer than its header says")
        samples = block.mean(axis=1)
        yield _finite(samples if stream is None else stream.resample_chunk(_finite(samples)))
    if exact and done < length:
        raise InvalidPayload(f"the audio is broken: it ends after {done / rate:.6g} of {length / rate:.6g} s")
    if stream is not None:
        yield _finite(stream.resample_chunk(numpy.zeros(0, numpy.float32), last=True))


def _finite(samples: Any) -> Any:
    if not numpy.isfinite(samples).all():
        raise InvalidPayload("the audio has samples that are not finite numbers")
    return samples

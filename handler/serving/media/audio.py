"""Audio: limits, and the length declared in a file header."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from handler.core.errors import InvalidPayload
from handler.core.media import SAMPLE_RATE
from handler.serving.media.decoder import Decoder, FileRules, Size

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox import Work

_CHUNKS = 64  # maximum number of chunks in a WAV before its samples; recorders write about five
_STREAMED = 0x7FFF_0000  # a declared size from here on means that the program did not know the size
_TEXTS = (b"TXX", b"COM", b"USL", b"ULT")  # first bytes of ID3v2's text frames that have names of their own
MAX_TEXTS = 512
_PAGE = re.compile(b"OggS")
_MOST_WITHIN = 64  # maximum number of page headers within pages; by chance, sound contains one in 4 GB
MIN_RATE, MAX_RATE = 4_000, 192_000  # Hz; telephones use 8,000, studios 192,000
MAX_CHANNELS = 8
MAX_SAMPLES_PER_SECOND = 8 * 48_000
"""Maximum number of samples per second over all channels, which limits the cost of decoding one second."""


def num_samples(size: Sequence[int]) -> int:
    """Return the number of samples of an audio file after conversion to one channel at `SAMPLE_RATE`.

    Args:
        size: samples per channel, sample rate, and number of channels of the file.

    Raises:
        InvalidPayload: the sample rate or number of channels is not supported, or the audio is empty.
    """
    length, rate, channels = size
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidPayload(f"the audio has {channels} channels; it must have 1 to {MAX_CHANNELS}")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidPayload(f"the audio has {rate} samples per second; it must have {MIN_RATE} to {MAX_RATE}")
    if rate * channels > MAX_SAMPLES_PER_SECOND:
        each = f"the audio has {channels} channels of {rate} samples per second"
        raise InvalidPayload(f"{each}; the limit for all channels together is {MAX_SAMPLES_PER_SECOND}")
    if not length:
        raise InvalidPayload("the audio has no samples")
    return -(-length * SAMPLE_RATE // rate)


def read_size(data: bytes) -> tuple[int, int, int]:
    """Return the samples per channel, the sample rate and the number of channels from a WAV or FLAC header. Return
    zeros if the file has none.

    This takes only microseconds for any input. The decoder may find a different size.

    Raises:
        InvalidPayload: the header is broken, lacks a length, or declares an unsupported sample rate or number of
            channels.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav_size(data)
    if data[:4] == b"fLaC" and len(data) >= 26 and data[4] & 0x7F == 0:
        packed = int.from_bytes(data[18:26], "big")  # RFC 9639, section 8.2
        length = packed & ((1 << 36) - 1)
        if not length:
            raise InvalidPayload(
                "the audio's header does not say how long it is; write the audio to a file, not to a pipe"
            )
        return length, packed >> 44, (packed >> 41 & 7) + 1
    return 0, 0, 0


def check_tags(file: bytes) -> None:
    """Raise InvalidPayload if an MP3 has too many text tags. libmpg123 compares each tag with all previous tags."""
    texts = sum(map(file.count, _TEXTS))
    if texts > MAX_TEXTS:
        raise InvalidPayload(f"the audio's tags have {texts} texts; at most {MAX_TEXTS} are allowed")


def check_pages(file: bytes) -> None:
    """Raise InvalidPayload if many pages of an Ogg file contain further page headers in their data.

    After a wrong checksum, libogg continues at the next header, and computes another checksum over up to 64 KiB.
    """
    end = within = 0
    for page in _PAGE.finditer(file):
        offset = page.start()
        if offset < end:
            within += 1
            if within > _MOST_WITHIN:
                raise InvalidPayload(f"the audio is broken: more than {_MOST_WITHIN} page headers are in other pages")
            continue
        segments = offset + 27  # RFC 3533, section 6
        end = segments + file[segments - 1] if segments <= len(file) else len(file)
        end += sum(file[segments:end])


def _wav_size(data: bytes) -> tuple[int, int, int]:
    rate, channels, frame, offset = 0, 0, 0, 12
    for _ in range(_CHUNKS):
        head = data[offset : offset + 8]
        if len(head) < 8:
            break
        name, length = head[:4], int.from_bytes(head[4:], "little")
        offset += 8
        if name == b"fmt ":
            fields = data[offset : offset + 16]
            if len(fields) < 16:
                break
            channels, rate = int.from_bytes(fields[2:4], "little"), int.from_bytes(fields[4:8], "little")
            frame = int.from_bytes(fields[12:14], "little")  # bytes of one sample in all channels
            num_samples((1, rate, channels))
        if name == b"data":
            return _length(length, len(data) - offset, frame), rate, channels
        offset += length + length % 2
    raise InvalidPayload("the audio is broken: its header declares no samples")


def _length(declared: int, available: int, frame: int) -> int:
    """Return the number of samples per channel in a WAV file.

    Args:
        declared: size of the sample data declared in the header, in bytes.
        available: number of bytes after the header.
        frame: size of one sample in all channels, in bytes.
    """
    if not frame:
        raise InvalidPayload("the audio is broken: its header does not say how its samples are encoded")
    if available < declared < _STREAMED:
        broken = f"its header declares {declared} bytes of samples, but {available} follow"
        raise InvalidPayload(f"the audio is broken: {broken}")
    return min(declared, available) // frame


def _rules(config: Config) -> FileRules:
    return FileRules(config.max_audio_bytes, config.max_audio_seconds * SAMPLE_RATE, config.audio_fetch_timeout)


def _samples(size: Size, rules: FileRules) -> int:
    if not any(size):
        return 0  # the decoder finds the size of an MP3 or Ogg
    samples = num_samples(size)
    if samples > rules.max_units:
        limit = f"at most {rules.max_units // SAMPLE_RATE} s (option.max_audio_seconds)"
        raise InvalidPayload(f"the audio is {size[0] / size[1]:.6g} s long; {limit}")
    return samples


def _make() -> Work:
    from handler.serving.media.audio_decoder import decode  # loads libsndfile, only in the sandbox's process

    return decode


DECODER = Decoder(
    _rules,
    read_size,
    _samples,
    unit_bytes=4,
    unit_memory=12,
    make=_make,
    packages=("soundfile", "soxr"),
    extra="audio",
)

"""Audio clips: their lengths by their files' headers, and their samples."""

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

_CHUNKS = 64  # of a WAV before its samples; a recorder writes some five
_STREAMED = 0x7FFF_0000  # bytes of samples that programs write where they do not know the number yet, and more
_TEXTS = (b"TXX", b"COM", b"USL", b"ULT")  # how the frames of ID3v2's texts begin that have a name of their own
_MOST_TEXTS = 512
_PAGE = re.compile(b"OggS")
_MOST_WITHIN = 64  # heads within pages; in sound, the four bytes come by chance once in 4 GB
_LEAST_RATE, _MOST_RATE = 4_000, 192_000  # Hz: telephones have 8,000, studios 192,000
_MOST_CHANNELS = 8
_MOST_PER_SECOND = 8 * 48_000
"""Samples of all channels in a second: the work that a second of a clip may cost."""


def num_samples(size: Sequence[int]) -> int:
    """Return how many samples a clip has, once it is converted for models: `SAMPLE_RATE`, one channel.

    Args:
        size: samples of one channel, their number in a second, and channels, as its file has them.

    Raises:
        InvalidPayload: such clips are not supported.
    """
    length, rate, channels = size
    if not 1 <= channels <= _MOST_CHANNELS:
        raise InvalidPayload(f"the audio has {channels} channels; it must have 1 to {_MOST_CHANNELS}")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise InvalidPayload(f"the audio has {rate} samples a second; it must have {_LEAST_RATE} to {_MOST_RATE}")
    if rate * channels > _MOST_PER_SECOND:
        each = f"the audio has {channels} channels of {rate} samples a second"
        raise InvalidPayload(f"{each}; all channels together may have {_MOST_PER_SECOND}")
    if not length:
        raise InvalidPayload("the audio has no samples")
    return -(-length * SAMPLE_RATE // rate)


def read_size(data: bytes) -> tuple[int, int, int]:
    """Return length, rate and channels as a WAV or FLAC gives them; zeros where they cannot be found.

    It takes microseconds, whatever the bytes are. A decoder may find another size.

    Raises:
        InvalidPayload: the header contradicts itself or the file.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav_size(data)
    if data[:4] == b"fLaC" and len(data) >= 26 and data[4] & 0x7F == 0:
        packed = int.from_bytes(data[18:26], "big")  # RFC 9639, section 8.2
        length = packed & ((1 << 36) - 1)
        if not length:
            raise InvalidPayload("the audio's header does not say how long it is; write it to a file, not to a pipe")
        return length, packed >> 44, (packed >> 41 & 7) + 1
    return 0, 0, 0


def check_tags(file: bytes) -> None:
    """Raise InvalidPayload where an MP3's tags have very many texts: libmpg123 compares each with all before it."""
    texts = sum(map(file.count, _TEXTS))
    if texts > _MOST_TEXTS:
        raise InvalidPayload(f"the audio's tags have {texts} texts; at most {_MOST_TEXTS} are read")


def check_pages(file: bytes) -> None:
    """Raise InvalidPayload where an Ogg's pages contain headers of further pages.

    Where a checksum is wrong, libogg continues at the next header, and computes that one's checksum over up to 64
    KiB.
    """
    end = within = 0
    for found in _PAGE.finditer(file):
        place = found.start()
        if place < end:
            within += 1
            if within > _MOST_WITHIN:
                raise InvalidPayload(
                    f"the audio is broken: more than {_MOST_WITHIN} page headers lie within other pages"
                )
            continue
        segments = place + 27  # RFC 3533, section 6
        end = segments + file[segments - 1] if segments <= len(file) else len(file)
        end += sum(file[segments:end])


def _wav_size(data: bytes) -> tuple[int, int, int]:
    rate, channels, frame, place = 0, 0, 0, 12
    for _ in range(_CHUNKS):
        head = data[place : place + 8]
        if len(head) < 8:
            break
        name, length = head[:4], int.from_bytes(head[4:], "little")
        place += 8
        if name == b"fmt ":
            fields = data[place : place + 16]
            if len(fields) < 16:
                break
            channels, rate = int.from_bytes(fields[2:4], "little"), int.from_bytes(fields[4:8], "little")
            frame = int.from_bytes(fields[12:14], "little")  # bytes of a sample of each channel
            num_samples((1, rate, channels))
        if name == b"data":
            return _length(length, len(data) - place, frame), rate, channels
        place += length + length % 2
    raise InvalidPayload("the audio is broken: its header declares no samples")


def _length(named: int, there: int, frame: int) -> int:
    """Return how many samples of a channel a WAV has."""
    if not frame:
        raise InvalidPayload("the audio is broken: its header does not say how its samples are encoded")
    if named > there and named < _STREAMED:
        raise InvalidPayload(f"the audio is broken: its header declares {named} bytes of samples, but {there} follow")
    return min(named, there) // frame


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
    from handler.serving.media.audio_decoder import decode  # libsndfile, in the process only

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

"""Audio clips, sound and broken."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import numpy
import soundfile

Samples = Any
"""An array of floats [samples] or [samples, channels]."""


def tone(seconds: float = 0.5, rate: int = 16_000, channels: int = 1, hertz: float = 440.0) -> Samples:
    times = numpy.arange(int(seconds * rate)) / rate
    wave = (0.3 * numpy.sin(2 * numpy.pi * hertz * times)).astype(numpy.float32)
    return wave if channels == 1 else numpy.stack([wave] * channels, axis=1)


def clip_file(
    samples: Samples | None = None, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None
) -> bytes:
    samples = tone(rate=rate) if samples is None else samples
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, channels, subtype=subtype, format=kind) as writer:
        for start in range(0, len(samples), 4096):  # libsndfile's writer of Vorbis has a stack for so many
            writer.write(samples[start : start + 4096])
    return file.getvalue()


def wav(
    data: bytes, *, rate: int = 16_000, channels: int = 1, bits: int = 16, code: int = 1, named: int | None = None
) -> bytes:
    """A WAV whose header says so; `named` is the length that it gives to its data."""
    frame = channels * bits // 8
    head = struct.pack("<HHIIHH", code, channels, rate, rate * frame & 0xFFFFFFFF, frame, bits)
    body = b"WAVE" + _chunk(b"fmt ", head) + b"data" + struct.pack("<I", len(data) if named is None else named) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac(length: int, file: bytes | None = None) -> bytes:
    """A FLAC whose header names another number of samples, of 36 bits."""
    file = clip_file(kind="FLAC") if file is None else file
    packed = int.from_bytes(file[18:26], "big") >> 36 << 36 | length
    return file[:18] + packed.to_bytes(8, "big") + file[26:]


def ogg(samples: int, file: bytes) -> bytes:
    """An Ogg whose last page says that so many samples have come (RFC 3533, section 6)."""
    last = file.rindex(b"OggS")
    page = bytearray(file[last:])
    page[6:14], page[22:26] = samples.to_bytes(8, "little"), bytes(4)
    page[22:26] = _ogg_checksum(page).to_bytes(4, "little")
    return file[:last] + bytes(page)


def _ogg_checksum(page: bytes | bytearray) -> int:
    found = 0
    for byte in page:
        found ^= byte << 24
        for _ in range(8):
            found = (found << 1 ^ (0x04C1_1DB7 if found >> 31 else 0)) & 0xFFFF_FFFF
    return found


def id3(number: int, name: bytes, text: bytes) -> bytes:
    """An MP3 whose ID3v2.3 tag has so many frames; in the text, a `%` is the frame's number, of eight digits."""
    frames = [text.replace(b"%", b"%08d" % index) for index in range(number)]
    tag = b"".join(name + len(frame).to_bytes(4, "big") + b"\0\0" + frame for frame in frames)
    size = bytes(len(tag) >> bits & 0x7F for bits in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + tag + clip_file(kind="MP3")


def audio_url(file: bytes, kind: str = "wav") -> str:
    return f"data:audio/{kind};base64,{base64.b64encode(file).decode()}"


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data

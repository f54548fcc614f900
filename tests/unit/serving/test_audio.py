"""Audio clips: decoded to 16 kHz and one channel, and what wrong ones are refused by, before work is done."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import pytest

from handler.config.loader import read_config
from handler.core.errors import InvalidPayload
from handler.core.media import SAMPLE_RATE, MediaSource, Medium
from handler.engines.process.sandbox import Sandbox
from handler.serving.media import audio
from handler.serving.media.audio import DECODER, check_pages, check_tags, read_size
from handler.serving.media.audio_decoder import decode
from handler.serving.media.decoder import LargerThanRead
from handler.serving.media.loader import SECONDS, MediaLoader, media_rules
from tests.app.media.clips import clip_file, flac, id3, ogg, tone, wav
from tests.doubles.steps import steps
from tests.limits import undocumented

RULES = media_rules(read_config(overrides=["option.max_audio_seconds=60"], environ={}).checked())
MIB = 1 << 20
FORMATS = (
    ("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAVEX", "PCM_16"),
    ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"),
)  # fmt: skip


@pytest.fixture(scope="module")
def clips() -> Iterator[MediaLoader]:
    loader = MediaLoader(RULES)
    yield loader
    gc.collect()
    assert loader.memory.taken == 0, "all memory is given back, whatever was refused"
    loader.close()


def source(file: bytes, name: str = "clip") -> MediaSource:
    return MediaSource("audio", file, "", name)


def load(loader: MediaLoader, file: bytes) -> tuple[Medium, Any]:
    (medium,) = loader.load([source(file)]).result().media
    samples = numpy.frombuffer(medium.data, numpy.float32)
    assert medium.size == (len(samples),)
    return medium, samples


@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (48_000, 2), (8_000, 1)])
def test_every_format_becomes_samples_of_one_rate(
    clips: MediaLoader, kind: str, subtype: str, rate: int, channels: int
) -> None:
    given = tone(1.0, rate, channels)
    _, samples = load(clips, clip_file(given, rate, kind, subtype))
    assert abs(len(samples) - SAMPLE_RATE) <= (2500 if kind == "MP3" else 2)  # an MP3 has whole frames
    if kind == "MP3":
        samples = samples[:SAMPLE_RATE]
    middle = samples[4000:12_000]
    assert 0.25 < numpy.abs(middle).max() < 0.35
    assert numpy.argmax(numpy.abs(numpy.fft.rfft(middle))) == 220  # 440 Hz, in steps of 2


def test_channels_are_averaged(clips: MediaLoader) -> None:
    left, right = tone(0.5), tone(0.5, hertz=1000.0)
    _, samples = load(clips, clip_file(numpy.stack([left, right], axis=1), subtype="FLOAT"))
    assert numpy.allclose(samples, (left + right) / 2, atol=1e-7)


def test_equal_samples_have_equal_digests(clips: MediaLoader) -> None:
    given = (tone(0.5) * 32_767).astype(numpy.int16)  # so that both files have the same numbers
    one, two = (load(clips, clip_file(given, kind=kind, subtype="PCM_16"))[0] for kind in ("WAV", "FLAC"))
    other, longer = load(clips, clip_file(given // 2))[0], load(clips, clip_file(tone(0.6)))[0]
    assert (one.digest, one.data) == (two.digest, two.data)
    assert len({one.digest, other.digest, longer.digest}) == 3


def _flac_with(block: bytes) -> bytes:
    """A FLAC with this block of metadata after its first one, very many times."""
    file = clip_file(kind="FLAC")
    return file[:42] + block * (MIB // len(block)) + file[42:]


TAGS = {
    "a WAV's notes": (clip_file() + b"LIST\4\0\0\0INFO" * (MIB // 12), "WAV"),
    "a FLAC's padding": (_flac_with(b"\1\0\0\0"), "FLAC"),
    "a FLAC's comments": (_flac_with(b"\4\0\0\x08" + bytes(8)), "FLAC"),
    "a FLAC's pictures": (_flac_with(b"\6\0\0\x20" + bytes(32)), "FLAC"),
    "an MP3's texts": (id3(512, b"TXXX", b"\0%\0a"), "MP3"),
    "an MP3's titles": (id3(MIB // 12, b"TIT2", b"\0a"), "MP3"),
    "an MP3's pictures": (id3(MIB // 64, b"APIC", b"\0image/png\0\3%\0" + bytes(30)), "MP3"),
    "bytes after an Ogg": (clip_file(kind="OGG") + bytes(MIB), "OGG"),
}


@pytest.mark.parametrize("name", TAGS)
def test_tags_change_no_sample(clips: MediaLoader, name: str) -> None:
    file, kind = TAGS[name]
    assert load(clips, file)[0].digest == load(clips, clip_file(kind=kind))[0].digest


def test_a_wav_of_a_pipe_ends_where_the_file_ends(clips: MediaLoader) -> None:
    samples = bytes(32_000)
    for named in (0xFFFFFFFF, 0x7FFFFFFF):
        assert load(clips, wav(samples, named=named))[0].size == (16_000,)


def test_the_first_bytes_say_the_length() -> None:
    assert read_size(clip_file(tone(0.5, 44_100, 2), 44_100)) == (22_050, 44_100, 2)
    assert read_size(clip_file(tone(0.5, 44_100, 2), 44_100, "FLAC")) == (22_050, 44_100, 2)
    flac = clip_file(tone(0.5, 44_100, 2), 44_100, "FLAC")
    assert [read_size(flac[:end]) for end in (26, 25)] == [(22_050, 44_100, 2), (0, 0, 0)]
    for file in (clip_file(), clip_file(kind="FLAC"), clip_file(kind="OGG"), clip_file(kind="MP3")):
        for end in range(200):
            with contextlib.suppress(InvalidPayload):
                assert min(read_size(file[:end])) >= 0
    for hostile in (b"RIFF\0\0\0\0WAVE" + b"LIST\0\0\0\0" * (2 << 20), b"RIFF\0\0\0\0WAVE" + b"\xff" * (20 << 20)):
        assert steps(functools.partial(refuse_size, hostile)) < 5_000


def refuse_size(file: bytes) -> None:
    with pytest.raises(InvalidPayload, match="its header declares no samples"):
        read_size(file)


NAN = numpy.full(1600, numpy.nan, numpy.float32)
WRONG: dict[str, tuple[bytes, str, bool]] = {
    "nothing": (b"", "the audio is empty", True),
    "a text": (b"what is this?", "it is not WAV, FLAC, MP3 or Ogg (Vorbis, Opus)", False),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(99), "it is not WAV, FLAC, MP3 or Ogg (Vorbis, Opus)", False),
    "MP4": (b"\0\0\0\x20ftypM4A " + bytes(99), "it is not WAV, FLAC, MP3 or Ogg (Vorbis, Opus)", False),
    "AIFF": (clip_file(kind="AIFF"), "it is not WAV, FLAC, MP3 or Ogg (Vorbis, Opus)", False),
    "an encoding of telephones": (
        clip_file(subtype="GSM610"), "its encoding is not supported: WAV of GSM610", False),
    "no channel": (wav(bytes(99), channels=0), "the audio has 0 channels; it must have 1 to 8", True),
    "65,535 channels": (wav(bytes(99), channels=65_535, bits=8), "the audio has 65535 channels", True),
    "192 kHz of 8 channels": (
        wav(bytes(3200), rate=192_000, channels=8),
        "the audio has 8 channels of 192000 samples per second; the limit for all channels together is 384000", True),
    "no rate": (wav(bytes(99), rate=0), "the audio has 0 samples per second; it must have 4000 to 192000", True),
    "4 GHz": (wav(bytes(99), rate=4_000_000_000), "the audio has 4000000000 samples per second", True),
    "no samples": (wav(b""), "the audio has no samples", True),
    "only its first bytes": (clip_file()[:20], "the audio is broken: its header declares no samples", True),
    "a WAV cut short": (clip_file()[:8000], "declares 16000 bytes of samples, but 7956 follow", True),
    "a WAV that says more": (wav(bytes(99), named=1 << 30), "declares 1073741824 bytes of samples, but 99 "
                                                            "follow", True),
    "a WAV too long": (wav(bytes(2 * MIB)), "the audio is 65.536 s long; at most 60 s (option.max_audio_s", True),
    "8 hours of silence": (
        flac(8 * 3600 * 16_000), "the audio is 28800 s long; at most 60 s (option.max_audio_seconds)", True),
    "a FLAC that says nothing": (flac(0), "the audio's header does not say how long it is", True),
    "a FLAC that says less": (flac(10), "", False),
    "a FLAC that says more": (flac(9000), "the audio is broken", False),
    "a FLAC cut short": (clip_file(kind="FLAC")[:500], "the audio is broken", False),
    "an Ogg cut short": (clip_file(kind="OGG")[:200], "the audio is broken", False),
    "an MP3 of nothing": (b"\xff\xfb\x90\xc4" + bytes(4000), "the audio is broken", False),
    "an Ogg too long": (
        clip_file(numpy.zeros(61 * 16_000, numpy.float32), kind="OGG"), "the audio is 61 s long; at most 60 s", False),
    "an MP3 too long": (
        clip_file(numpy.zeros(61 * 16_000, numpy.float32), kind="MP3"), "s long; at most 60 s", False),
    "an Ogg of nothing but heads": (clip_file(kind="OGG") + b"OggS" * MIB, "more than 64 page headers", False),
    "heads in an Ogg's first page": (b"OggS" * 99 + clip_file(kind="OGG"), "more than 64 page headers", False),
    "texts in an MP3's tag": (id3(513, b"TXXX", b"\0%\0a"), "the audio's tags have 513 texts; at most 512", False),
    "comments in an MP3's tag": (id3(513, b"COMM", b"\0eng%\0a"), "the audio's tags have 513 texts", False),
    "lyrics in an MP3's tag": (id3(513, b"USLT", b"\0eng%\0a"), "the audio's tags have 513 texts", False),
    "NaN": (clip_file(NAN, subtype="FLOAT"), "the audio has samples that are not finite numbers", False),
    "NaN at another rate": (
        clip_file(NAN, 44_100, subtype="FLOAT"), "the audio has samples that are not finite numbers", False),
    "infinite": (
        wav(numpy.full(99, numpy.inf, numpy.float32).tobytes(), bits=32, code=3), "not finite numbers", False),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_clip_is_refused_by_name_and_its_neighbour_is_not(clips: MediaLoader, name: str) -> None:
    """Those that a header tells are never given to the decoder."""
    file, words, by_header = WRONG[name]
    with mock.patch.object(Sandbox, "run", autospec=True, side_effect=Sandbox.run) as run:
        future = clips.load([source(file, "messages[0].content[1].input_audio.data")])
        if not words:
            assert future.result().media[0].size == (10,)
        else:
            with pytest.raises(InvalidPayload) as raised:
                future.result()
            assert raised.value.message.startswith("messages[0].content[1].input_audio.data: ")
            assert words in raised.value.message
        assert run.called is not by_header
    assert load(clips, clip_file())[0].size == (8000,)


def test_a_clip_that_takes_too_long_ends_its_own_decoding(clips: MediaLoader) -> None:
    with (
        mock.patch("handler.serving.media.loader.SECONDS", 1e-3),
        mock.patch("handler.serving.media.loader._QUICK_SECONDS", 1e-3),
        pytest.raises(InvalidPayload, match=r"the audio needs more than 0\.001 s"),
    ):
        clips.load([source(clip_file(tone(50.0, 44_100), 44_100, "MP3"))]).result()
    assert load(clips, clip_file())[0].size == (8000,)


def test_page_headers_in_other_pages_are_counted_one_by_one() -> None:
    page = b"OggS" + bytes(22) + bytes([255]) + bytes([255]) * 255  # of 255 * 255 bytes, which contain the headers
    check_pages(page + b"OggS" * 64)
    with pytest.raises(InvalidPayload, match="more than 64 page headers"):
        check_pages(page + b"OggS" * 65)


# -- what the decoder's process does, within this one --------------------------------------------------------------


def decoded(file: bytes, most: int = 60 * SAMPLE_RATE) -> tuple[str, Any]:
    """The digest and the samples of a clip of at most so many."""
    ((length,), digest), *parts = decode(most, memoryview(file))
    data = b"".join(parts)
    assert len(data) == 4 * length
    assert digest == hashlib.sha256(b"audio %d " % length + data).hexdigest()
    return digest, numpy.frombuffer(data, numpy.float32)


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (48_000, 2), (8_000, 1)])
def test_a_clip_of_a_known_length_has_it_at_its_new_rate(kind: str, rate: int, channels: int) -> None:
    file = clip_file(tone(3.0, rate, channels), rate, kind)
    assert len(decoded(file, 3 * SAMPLE_RATE)[1]) == 3 * SAMPLE_RATE
    with pytest.raises(LargerThanRead) as raised:
        decoded(file, 3 * SAMPLE_RATE - 1)
    assert raised.value.args == (3 * rate, rate, channels)


@pytest.mark.parametrize("kind", ["OGG", "MP3"])
def test_a_clip_of_unknown_length_is_measured_first(kind: str) -> None:
    file = clip_file(tone(3.0), kind=kind)
    with pytest.raises(LargerThanRead) as raised:
        decoded(file, 0)
    length, *_ = size = raised.value.args
    assert size[1:] == (16_000, 1)
    assert abs(length - 48_000) <= (2500 if kind == "MP3" else 0)
    assert len(decoded(file, length)[1]) == length


def test_an_mp3_longer_than_it_was_measured_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="it is longer than its header says"):
        decoded(clip_file(tone(3.0), kind="MP3"), 100)


def test_the_decoder_averages_channels_and_keeps_the_samples_of_its_rate() -> None:
    left, right = tone(3.0), tone(3.0, hertz=1000.0)
    _, samples = decoded(clip_file(numpy.stack([left, right], axis=1), subtype="FLOAT"))
    assert numpy.allclose(samples, (left + right) / 2, atol=1e-7)
    assert numpy.array_equal(decoded(clip_file(left, subtype="FLOAT"))[1], left)


def test_the_decoder_resamples_to_the_last_sample() -> None:
    _, samples = decoded(clip_file(tone(3.0, 48_000), 48_000, subtype="FLOAT"))
    assert numpy.allclose(samples[200:-200], tone(3.0)[200:-200], atol=1e-3)


@pytest.mark.parametrize("name", [name for name, (*_, by_header) in WRONG.items() if not by_header])
def test_the_decoder_says_what_is_wrong(name: str) -> None:
    file, words, _ = WRONG[name]
    if not words:
        assert len(decoded(file)[1]) == 10
    elif "at most 60 s" in words:
        with pytest.raises(LargerThanRead):
            decoded(file, 0)
    else:
        with pytest.raises(InvalidPayload) as raised:
            decoded(file, 0 if name.startswith("an MP3") else 60 * SAMPLE_RATE)
        assert words in raised.value.message


def test_an_ogg_that_ends_early_says_where() -> None:
    file = ogg(96_000, clip_file(tone(1.0, 48_000), 48_000, "OGG", "OPUS"))
    with pytest.raises(InvalidPayload, match=r"^the audio is broken: it ends after 1\.0035 of 1\.9935 s$"):
        decoded(file)


def test_as_many_texts_as_may_be_are_read() -> None:
    check_tags(id3(512, b"TXXX", b"\0%\0a"))
    with pytest.raises(InvalidPayload, match=r"^the audio's tags have 513 texts; at most 512 are allowed$"):
        check_tags(id3(513, b"TXXX", b"\0%\0a"))


def test_a_wav_that_does_not_say_its_samples_size_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="its header does not say how its samples are encoded"):
        read_size(wav(bytes(99), bits=0))


def test_the_decoders_process_decodes_by_it() -> None:
    assert DECODER.make() is decode


def test_the_limits_of_audio_are_documented() -> None:
    assert not undocumented(
        "media.md",
        f"{audio.MIN_RATE:,} to {audio.MAX_RATE:,} samples per second and channel, 1 to {audio.MAX_CHANNELS} channels",
        f"at most {audio.MAX_SAMPLES_PER_SECOND:,} samples per second",
        f"Decoding a file may take {SECONDS:g} s of CPU time",
        f"whose tags contain more than {audio.MAX_TEXTS} texts are refused",
    )

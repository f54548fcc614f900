"""Media in prompts: value types, token counts, and shared memory from which the engine reads the data."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

MEDIA = {"image": "images", "audio": "audio clips"}
"""Kinds of media with their plurals. The names are the same as in chat templates and `limit_mm_per_prompt`."""


def several(kinds: Iterable[str]) -> str:
    """Return the plurals of some kinds of media, joined with "and"."""
    return " and ".join([MEDIA[kind] for kind in dict.fromkeys(kinds)])


ALL_MEDIA = several(MEDIA)

SAMPLE_RATE = 16_000
"""Sample rate of decoded audio in Hz, as expected by audio models."""


class Upload(NamedTuple):
    """A file in a form. `data` is empty if the file was written to disk as it arrived."""

    data: bytes
    name: str = ""


class MediaSource(NamedTuple):
    """An image or audio in a request, as the client sent it.

    Attributes:
        kind: a key of `MEDIA`.
        data: contents of the file, or None if only `url` is known.
        url: address of the file, or "" if the client sent `data`.
        name: path of the field in the request body, for error messages.
    """

    kind: str
    data: bytes | None
    url: str
    name: str


class Medium(NamedTuple):
    """A decoded image, or decoded audio.

    Attributes:
        kind: a key of `MEDIA`.
        size: width and height of an image in pixels, or the number of audio samples.
        data: height × width × 3 bytes of an image: RGB, rows from the top, without padding. For audio, float32 samples
            of one channel at SAMPLE_RATE.
        digest: SHA-256 of size and data in hexadecimal; equal media of the same kind have equal digests.
    """

    kind: str
    size: tuple[int, ...]
    data: bytes
    digest: str


def media_of(
    wanted: Iterable[MediaSource], sources: Iterable[MediaSource], media: Iterable[Medium]
) -> list[Medium] | None:
    """Return the media of the wanted sources, or None if they are not among the sources in the same order.

    Args:
        sources: sources of the media. They may be more, and have other names.
    """
    remaining, kept = iter(zip(sources, media, strict=True)), list[Medium]()
    for source in wanted:
        medium = next((medium for other, medium in remaining if other[:3] == source[:3]), None)
        if medium is None:
            return None
        kept.append(medium)
    return kept


class MediaPrompt(NamedTuple):
    """The text and media of a prompt, which an engine receives in addition to the token ids.

    Attributes:
        text: the rendered chat, including special tokens, from which the token ids of the prompt were encoded.
        media: images and audio in the order of their placeholders in the text.
    """

    text: str
    media: tuple[Medium, ...]


class MediaTokens(Protocol):
    """Counts the tokens that media of one kind take up in a prompt for the model.

    Attributes:
        placeholder: token id that the chat template writes once for each image or audio.
        text: text to insert for each image or audio if the chat template accepts only strings.
    """

    @property
    def placeholder(self) -> int: ...

    @property
    def text(self) -> str: ...

    def count(self, size: Sequence[int]) -> int:
        """Return the number of tokens of an image or audio.

        Args:
            size: size of the image or audio, as in `Medium`.

        Raises:
            ValueError: the model does not accept this size.
        """


class FixedTokens(NamedTuple):
    """Counts a fixed number of tokens for every image or audio. See `MediaTokens`."""

    placeholder: int
    text: str
    number: int = 1

    def count(self, size: Sequence[int]) -> int:
        return self.number


class Stored(NamedTuple):
    """Description of an image or audio that is stored in a file. `length` is the size of its data in bytes."""

    kind: str
    size: tuple[int, ...]
    length: int
    digest: str


class MediaFile(NamedTuple):
    """A file from which another process of the same user reads the media of a prompt.

    Attributes:
        path: path of the file, which contains the data of all media one after another, or "" if there are no media.
        target: target of the link `path` as long as the file exists.
        text: text of the prompt.
        media: descriptions of the media, in the order of their data.
    """

    path: str
    target: str
    text: str
    media: tuple[Stored, ...]

    def read(self) -> MediaPrompt:
        """Read the media.

        Raises:
            OSError: the owner of the media has freed them.
        """
        if not self.media:
            return MediaPrompt(self.text, ())
        # The path may lead to another file by now, so the opened file is checked. O_NONBLOCK avoids waiting for a pipe.
        with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != self.target:
                raise FileNotFoundError(f"the {ALL_MEDIA} no longer exist, because their request has ended")
            return MediaPrompt(
                self.text,
                tuple(Medium(kind, size, file.read(length), digest) for kind, size, length, digest in self.media),
            )


class SharedMedia:
    """Shared memory with the media of a prompt, freed together with this object. Linux only (memfd_create).

    Attributes:
        file: description of the memory for the engine process.
    """

    def __init__(self, text: str, media: Sequence[Medium]) -> None:
        if not media:
            self.file = MediaFile("", "", text, ())
            return
        name = f"media-{secrets.token_hex(16)}"
        fd = os.memfd_create(name)
        weakref.finalize(self, os.close, fd)
        with open(fd, "wb", closefd=False) as file:
            for medium in media:
                file.write(medium.data)
        self.file = MediaFile(
            f"/proc/{os.getpid()}/fd/{fd}",
            f"/memfd:{name} (deleted)",
            text,
            tuple(Stored(kind, size, len(data), digest) for kind, size, data, digest in media),
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of the media, in order."""
        return tuple(stored.digest for stored in self.file.media)

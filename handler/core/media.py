"""Media in prompts: values, token counts, and shared memory that the engine reads, so that no channel carries the
bytes.
"""

from __future__ import annotations

import os
import random
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


def new_uuid() -> str:
    """Draw a random UUID (version 4) without a system call, for which a thread may have to wait its turn again."""
    digits = new_digits()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def new_digits() -> str:
    """Draw 128 random bits as 32 hexadecimal digits."""
    return f"{random.getrandbits(128):032x}"


def new_secret() -> str:
    """Draw 128 bits, as digits, that nobody can guess from others: for ids by which something is read."""
    return secrets.token_hex(16)


MEDIA = {"image": "images", "audio": "audio clips"}
"""Kinds of media, each with its plural; the names are those of chat templates and `limit_mm_per_prompt`."""


def several(kinds: Iterable[str]) -> str:
    """Return the word for media of these kinds."""
    return " and ".join([MEDIA[kind] for kind in dict.fromkeys(kinds)])


ALL_MEDIA = several(MEDIA)

SAMPLE_RATE = 16_000
"""Sample rate of decoded audio, in Hz, as audio models expect it."""


class Upload(NamedTuple):
    """A file of a form; `data` is empty if it has been written as it came."""

    data: bytes
    name: str = ""


class MediaSource(NamedTuple):
    """A medium of a message, as the client sent it.

    Attributes:
        kind: of MEDIA.
        data: the file; None if `url` names it.
        url: "" with `data`.
        name: the field's path in the body, for messages.
    """

    kind: str
    data: bytes | None
    url: str
    name: str


class Medium(NamedTuple):
    """A decoded medium.

    Attributes:
        kind: of MEDIA.
        size: an image's width and height, in pixels; the number of an audio clip's samples.
        data: an image's height × width × 3 bytes: RGB, rows from the top, without padding. An audio clip's
            samples, four bytes of a float each, of one channel at SAMPLE_RATE.
        digest: SHA-256 of size and data, hexadecimal; equal media of a kind have equal ones.
    """

    kind: str
    size: tuple[int, ...]
    data: bytes
    digest: str


class MediaPrompt(NamedTuple):
    """A prompt with media, in addition to its ids.

    Attributes:
        text: the rendered chat with special tokens in it, whose ids are the prompt's.
        media: in the order of their placeholders in the text.
    """

    text: str
    media: tuple[Medium, ...]


class MediaTokens(Protocol):
    """A model's count of tokens for media of one kind.

    Attributes:
        placeholder: id that the chat template writes once a medium.
        text: that of a medium, where the chat template takes texts only.
    """

    @property
    def placeholder(self) -> int: ...

    @property
    def text(self) -> str: ...

    def count(self, size: Sequence[int]) -> int:
        """Count the tokens of a medium of this size, which is as in `Medium`.

        Raises:
            ValueError: the model does not take such a medium.
        """


class Stored(NamedTuple):
    """A medium in a file: `length` bytes of data."""

    kind: str
    size: tuple[int, ...]
    length: int
    digest: str


class MediaFile(NamedTuple):
    """The file in which another process of the same user finds a prompt's media.

    Attributes:
        path: of the file with the media's data, one after another; "" without media.
        target: what `path` links to while the file is there.
        text: of the prompt.
        media: the media in the file.
    """

    path: str
    target: str
    text: str
    media: tuple[Stored, ...]

    def read(self) -> MediaPrompt:
        """Read the media.

        Raises:
            OSError: their owner has freed them.
        """
        if not self.media:
            return MediaPrompt(self.text, ())
        # What the path leads to may be another file by now: the opened one is asked, and no pipe is waited for.
        with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != self.target:
                raise FileNotFoundError(f"the {ALL_MEDIA} are gone: their request has ended")
            return MediaPrompt(
                self.text,
                tuple(Medium(kind, size, file.read(length), digest) for kind, size, length, digest in self.media),
            )


class SharedMedia:
    """Media of a prompt, copied once; freed with this object. Linux only (memfd_create).

    Attributes:
        file: for the engine's process.
    """

    def __init__(self, text: str, media: Sequence[Medium]) -> None:
        if not media:
            self.file = MediaFile("", "", text, ())
            return
        name = f"media-{new_digits()}"
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
        """The media's digests."""
        return tuple(stored.digest for stored in self.file.media)

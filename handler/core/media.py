"""Images of prompts: values, their tokens, and memory that the engine reads too; no channel carries their bytes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from handler.core.identifiers import new_digits


class MediaSource(NamedTuple):
    """An image of a message, as the client sent it.

    Attributes:
        data: the file; None where `url` names it.
        url: "" with `data`.
        name: the field's path in the body, for messages.
    """

    data: bytes | None
    url: str
    name: str


class Image(NamedTuple):
    """A decoded image.

    Attributes:
        width, height: in pixels.
        rgb: height × width × 3 bytes: rows from the top, without padding.
        digest: SHA-256 of size and pixels, hexadecimal; equal images have equal ones.
    """

    width: int
    height: int
    rgb: bytes
    digest: str


class MediaPrompt(NamedTuple):
    """A prompt with images, beside its ids.

    Attributes:
        text: the rendered chat with special tokens in it, whose ids are the prompt's.
        media: in the order of their placeholders in the text.
    """

    text: str
    media: tuple[Image, ...]


class MediaTokens(Protocol):
    """How a model counts the tokens of images.

    Attributes:
        placeholder: id that the chat template writes once an image.
        text: that of an image, where the chat template takes texts only.
    """

    @property
    def placeholder(self) -> int: ...

    @property
    def text(self) -> str: ...

    def count(self, width: int, height: int) -> int:
        """Count the tokens of an image of `width` times `height` pixels.

        Raises:
            ValueError: the model does not take such an image.
        """


class MediaFile(NamedTuple):
    """Where another process of the same user finds a prompt's images.

    Attributes:
        path: of the file with the images' pixels, one after another; "" without images.
        target: what `path` links to while the file is there.
        text: of the prompt.
        media: width, height and digest of each.
    """

    path: str
    target: str
    text: str
    media: tuple[tuple[int, int, str], ...]

    def read(self) -> MediaPrompt:
        """Read the images.

        Raises:
            OSError: their owner has freed them.
        """
        if not self.media:
            return MediaPrompt(self.text, ())
        # What the path leads to may be another file by now: the opened one is asked, and no pipe is waited for.
        with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != self.target:
                raise FileNotFoundError("the images are gone: their request has ended")
            return MediaPrompt(
                self.text,
                tuple(
                    Image(width, height, file.read(width * height * 3), digest) for width, height, digest in self.media
                ),
            )


class SharedMedia:
    """Images of a prompt, copied once; freed with this object. Linux only (memfd_create).

    Attributes:
        file: for the engine's process.
    """

    def __init__(self, text: str, media: Sequence[Image]) -> None:
        sizes = tuple((image.width, image.height, image.digest) for image in media)
        if not media:
            self.file = MediaFile("", "", text, ())
            return
        name = f"images-{new_digits()}"
        fd = os.memfd_create(name)
        weakref.finalize(self, os.close, fd)
        with open(fd, "wb", closefd=False) as file:
            for image in media:
                file.write(image.rgb)
        self.file = MediaFile(
            f"/proc/{os.getpid()}/fd/{fd}",
            f"/memfd:{name} (deleted)",
            text,
            sizes,
        )

    @property
    def digests(self) -> tuple[str, ...]:
        """The images' digests."""
        return tuple(digest for _, _, digest in self.file.media)

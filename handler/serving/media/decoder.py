"""The interface between the media loader and the decoders for each kind of media."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox import Work

Size = tuple[int, ...]
"""(width, height) of an image, or (samples per channel, sample rate, number of channels) of audio."""


class LargerThanRead(Exception):
    """An image or audio file is larger than its header declares. The exception's arguments are its size."""


class FileRules(NamedTuple):
    """Limits for media files of one kind.

    Attributes:
        max_bytes: maximum size of a file, in bytes.
        max_units: maximum number of pixels in an image, or of samples in audio.
        seconds: maximum seconds for downloading a file.
    """

    max_bytes: int
    max_units: int
    seconds: float


class Decoder(NamedTuple):
    """The decoder for media files of one kind.

    The cost of decoding is measured in units, which are the pixels of an image or the samples of audio.

    Attributes:
        rules: function that returns the limits that the options set.
        read_size: function that reads the size from a file's header within microseconds. It returns zeros if the header
            contains no size, and raises InvalidPayload if the header is wrong.
        units: function that returns the number of units of a size. It raises InvalidPayload if the size exceeds a
            limit.
        unit_bytes: bytes of a unit in the decoded data.
        unit_memory: bytes of memory per unit that decoding needs, in addition to the file.
        make: function that returns the decoding function. It is called in a sandbox's process. The decoding function
            gets the maximum number of units and the file; it yields the size and digest, then the data in parts. It
            raises LargerThanRead for a larger file, and InvalidPayload for a broken file.
        packages: the Python packages that the decoder needs.
        extra: extra of this package that installs those packages.
    """

    rules: Callable[[Config], FileRules]
    read_size: Callable[[bytes], Size]
    units: Callable[[Size, FileRules], int]
    unit_bytes: int
    unit_memory: int
    make: Callable[[], Work]
    packages: tuple[str, ...]
    extra: str

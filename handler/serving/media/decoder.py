"""Interface between the media loader and the decoders for each kind of media."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox import Work

Size = tuple[int, ...]
"""(width, height) of an image, or (samples per channel, sample rate, number of channels) of audio."""


class LargerThanRead(Exception):
    """Raised if an image or audio file is larger than its header declares. The arguments are its actual size."""


class FileRules(NamedTuple):
    """Limits for media files of one kind.

    Attributes:
        max_bytes: maximum size of a file, in bytes.
        max_units: maximum number of pixels in an image, or of samples in audio.
        seconds: maximum number of seconds to download a file.
    """

    max_bytes: int
    max_units: int
    seconds: float


class Decoder(NamedTuple):
    """The decoder for media files of one kind.

    The cost of decoding is measured in units: pixels of an image or samples of audio.

    Attributes:
        rules: function that returns the limits from the options.
        read_size: function that reads the size from a file header within microseconds. It returns zeros if the header
            contains no size, and raises InvalidPayload if the header is invalid.
        units: function that converts a size to a number of units. It raises InvalidPayload if the size exceeds a limit.
        unit_bytes: bytes per unit of decoded data.
        unit_memory: bytes of memory per unit that are needed for decoding, in addition to the file.
        make: function that returns the decoding function. It is called in a sandboxed process. The decoding function
            takes the maximum number of units and the file. It yields the size and digest, and then the data in parts.
            It raises LargerThanRead for a larger file, and InvalidPayload for a broken file.
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

"""The interface between the media loader and the decoders for each kind of media."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox import Work

Size = tuple[int, ...]
"""Size of a medium: width and height of an image; samples per channel, rate and channels of an audio clip."""


class LargerThanRead(Exception):
    """The medium is larger than its header declares. The arguments are its size."""


class FileRules(NamedTuple):
    """Limits for media files of one kind.

    Attributes:
        max_bytes: maximum size of a file, in bytes.
        max_units: maximum number of pixels in an image, or of samples in an audio clip.
        seconds: maximum seconds for downloading a file.
    """

    max_bytes: int
    max_units: int
    seconds: float


class Decoder(NamedTuple):
    """The decoder for media files of one kind.

    The cost of decoding is measured in units, which are the pixels of an image or the samples of an audio clip.

    Attributes:
        rules: returns the limits that the options set.
        read_size: returns the size from a file's header within microseconds, or zeros if the header has none. It raises
            InvalidPayload if the header is wrong.
        units: returns the number of units of a size. It raises InvalidPayload if the size exceeds a limit.
        unit_bytes: bytes of a unit in the decoded data.
        unit_memory: bytes of memory per unit that decoding needs, in addition to the file.
        make: returns the decoding function, in a sandbox's process. The function gets the maximum number of units and
            the file; it yields the size and digest, then the data in parts. It raises LargerThanRead for a larger file,
            and InvalidPayload for a broken one.
        packages: the Python packages that the decoder needs.
        extra: extra of this package that installs them.
    """

    rules: Callable[[Config], FileRules]
    read_size: Callable[[bytes], Size]
    units: Callable[[Size, FileRules], int]
    unit_bytes: int
    unit_memory: int
    make: Callable[[], Work]
    packages: tuple[str, ...]
    extra: str

"""The decoder of a kind of media, as the loader calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from handler.config.config import Config
    from handler.engines.process.sandbox import Work

Size = tuple[int, ...]
"""Size, digest and data, as in `Medium`."""


class LargerThanRead(Exception):
    """The medium is larger than its first bytes say; the arguments are its size."""


class FileRules(NamedTuple):
    """Rules for the files of one kind.

    Attributes:
        max_bytes: of a file.
        max_units: of a file's content: an image's pixels, an audio clip's samples.
        seconds: that a fetch may take in total.
    """

    max_bytes: int
    max_units: int
    seconds: float


class Decoder(NamedTuple):
    """The reader of the files of one kind.

    Costs are in units: an image's pixels, an audio clip's samples, or anything that takes as long to decode as a
    pixel.

    Attributes:
        rules: returns the rules that the options set.
        read_size: returns a file's size by its header, within microseconds; zeros if it cannot be found. Raises
            InvalidPayload where the header is wrong.
        units: returns those of a size. Raises InvalidPayload where the rules allow no such size.
        unit_bytes: of decoded data.
        unit_memory: bytes that decoding takes, besides the file.
        make: returns, in a sandbox's process, a function that decodes the job's file, of `subject` units at most. It
            yields size and digest, then the data in parts. It raises LargerThanRead, and InvalidPayload for a broken
            file.
        packages: that it needs.
        extra: of this package, which has them.
    """

    rules: Callable[[Config], FileRules]
    read_size: Callable[[bytes], Size]
    units: Callable[[Size, FileRules], int]
    unit_bytes: int
    unit_memory: int
    make: Callable[[], Work]
    packages: tuple[str, ...]
    extra: str

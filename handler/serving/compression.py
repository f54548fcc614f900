"""Decompression of request bodies with a Content-Encoding: gzip, deflate and zstd."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from handler.core.errors import NotJson, TooLarge, UnsupportedMedia

_ENCODINGS = ("gzip", "deflate", "zstd")
_ALIAS = "x-gzip"  # of gzip (RFC 9110, section 8.4.1.3)
_PART = 1 << 20  # maximum bytes that are decompressed at a time
_PIECE = 1 << 16  # maximum compressed bytes to decompress at a time
_MAX_FRAMES = 1000  # maximum frames of a body; each costs a decompressor and a copy of the rest of its piece
_WINDOW_LOG = 23
"""Maximum window of a zstd frame, as a power of two: 8 MiB, the limit for HTTP (RFC 9659, section 3). The decompressor
allocates the window, regardless of the size of the body."""


def content_encoding(headers: Mapping[str, str]) -> str:
    """Return the Content-Encoding of a body in lower case, or "" if the body is not encoded.

    Args:
        headers: headers by name in lower case.
    """
    encodings = headers.get("content-encoding", "").lower().split(",")
    names = [name for name in map(str.strip, encodings) if name not in ("", "identity")]
    return ", ".join(names)


def check_encoding(encoding: str) -> None:
    """Raise UnsupportedMedia if a Content-Encoding is not accepted. A body may be compressed only once."""
    if encoding not in ("", _ALIAS, *_ENCODINGS):
        raise UnsupportedMedia(
            f"content-encoding {encoding!r} is not supported; accepted: {', '.join(_ENCODINGS)}, one at a time"
        )


class BodyDecoder(Protocol):
    """Removes the Content-Encoding of a body as it arrives."""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Return the decoded data in parts.

        Raises:
            NotJson: the data is not encoded as the Content-Encoding says.
            TooLarge: the result is too large.
        """

    def end(self) -> None:
        """Raise NotJson if the body is truncated."""


class _Identity:
    """The decoder of bodies that are not encoded."""

    def feed(self, data: bytes) -> Iterable[bytes]:
        return (data,)

    def end(self) -> None:
        """Do nothing, because any data may be complete."""


def body_decoder(encoding: str, limit: int) -> BodyDecoder:
    """Return the decoder for a Content-Encoding.

    Args:
        encoding: an accepted Content-Encoding, or "" if the body is not encoded.
        limit: maximum size of a decompressed body, in bytes.
    """
    return Inflater(encoding, limit) if encoding else _Identity()


def inflate(body: bytes, encoding: str, limit: int, option: str = "") -> Iterator[bytes]:
    """Yield the decompressed body in parts of at most 1 MiB.

    Args:
        encoding: an accepted Content-Encoding.
        limit: maximum size of the result, in bytes.
        option: the option that sets the limit, in parentheses after a space, for the error message.

    Raises:
        NotJson: the body is not compressed, is truncated, or is followed by other data.
        TooLarge: the result is larger than `limit`.
    """
    inflater = Inflater(encoding, limit, option)
    yield from inflater.feed(body)
    inflater.end()


class Inflater:
    """An incremental decompressor for a body, which may consist of several gzip members or zstd frames.

    Args:
        encoding: an accepted Content-Encoding. For gzip and deflate, the first bytes of the body identify the format.
        limit: maximum size of the result, in bytes.
        option: the option that sets the limit, in parentheses after a space, for the error message.
    """

    def __init__(self, encoding: str, limit: int, option: str = "") -> None:
        self._open = _Zstd if encoding == "zstd" else _Zlib
        self._decoder: _Decoder = self._open()
        self._limit, self._option = limit, option
        self._size = 0
        self._num_frames = 1

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed data in parts of at most 1 MiB. Each part is decompressed when it is requested.

        Raises:
            NotJson: the data is not compressed with the encoding, or follows the end of the body.
            TooLarge: the result is larger than the limit.
        """
        for start in range(0, len(data), _PIECE):
            rest = data[start : start + _PIECE]
            while rest:
                if self._decoder.eof:
                    self._next_frame()
                yield from self._inflate(rest)
                rest = self._decoder.unused_data

    def end(self) -> None:
        """Raise NotJson if the body is truncated."""
        if not self._decoder.eof:
            raise NotJson(_FOLLOWED if self._num_frames > 1 else "the compressed body is cut off before its end")

    def _inflate(self, piece: bytes) -> Iterator[bytes]:
        """Yield the decompressed data of a piece, until the end of the piece or of the frame."""
        part = self._decompress(piece)
        while part:
            self._size += len(part)
            if self._size > self._limit:
                raise TooLarge(f"the decompressed body has more than {self._limit} bytes{self._option}")
            yield part
            part = b"" if self._decoder.eof else self._decompress(b"")

    def _decompress(self, piece: bytes) -> bytes:
        try:
            return self._decoder.decompress(piece, _PART)
        except _Corrupt as error:
            message = f"the body is not compressed as its Content-Encoding says: {error}"
            raise NotJson(_FOLLOWED if self._num_frames > 1 else message) from None

    def _next_frame(self) -> None:
        self._num_frames += 1
        if self._num_frames > _MAX_FRAMES:
            raise NotJson(f"the compressed body has more than {_MAX_FRAMES} frames")
        self._decoder = self._open()


_FOLLOWED = "the compressed body has further data after its end"


class _Corrupt(Exception):
    """The data cannot be decompressed."""


class _Decoder(Protocol):
    """A decompressor for one gzip member or zstd frame. It keeps the input that it has not used yet."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most `max_length` bytes, or b"" if more input is needed or the end has been reached.

        Raises:
            _Corrupt: the data is not of the decompressor's format.
        """


class _Zlib:
    """A decompressor for gzip and zlib."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # both formats

    @property
    def eof(self) -> bool:
        return bool(self._decoder.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._decoder.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._decoder.decompress(data or self._decoder.unconsumed_tail, max_length)
        except zlib.error:
            raise _Corrupt("it must begin with a gzip or zlib header") from None


class _Zstd:
    """A decompressor for zstd. The library is imported for the first such body."""

    def __init__(self) -> None:
        try:
            if sys.version_info >= (3, 14):
                from compression import zstd
            else:
                import backports.zstd as zstd
        except ImportError:  # Python 3.14 can be built without it
            raise UnsupportedMedia("content-encoding 'zstd' is not supported: this Python has no zstd module") from None
        self._error = zstd.ZstdError
        self._decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return bytes(self._decoder.decompress(data, max_length))
        except self._error as error:
            raise _Corrupt(f"{error}. Windows above 8 MiB and dictionaries are not supported") from None

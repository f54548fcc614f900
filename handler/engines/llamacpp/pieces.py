"""Finds token ids that llama-server does not send.

In a stream, llama-server sends a token only if the text so far ends with a complete character (`process_token` in
tools/server/server-context.cpp). If several tokens make up a character, only the id of the last one arrives, with the
text of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

MAX_MISSING = 8
"""Maximum number of ids that are recovered from their text. A character rarely has more than 4 tokens."""
_LONGEST = 4  # bytes of a character
_MAX_TEXT = 1 << 10  # bytes of a text whose ids are recovered; the search takes the square of their number


def is_incomplete(text: bytes) -> bool:
    """Return whether llama-server waits for the rest of a text's last character (`validate_utf8`)."""
    for num_bytes in range(1, min(len(text), 3) + 1):
        needed = _sizes(text[-num_bytes])
        if needed > num_bytes:
            return True
    return False


def _sizes(byte: int) -> int:
    """Return the size of the character that begins with this byte, or 0 if no character of several bytes does."""
    if byte & 0xE0 == 0xC0:
        return 2
    if byte & 0xF0 == 0xE0:
        return 3
    return 4 if byte & 0xF8 == 0xF0 else 0


class Pieces:
    """The tokens of a vocabulary, by their bytes.

    Args:
        pieces: the bytes of each token, indexed by id.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._ids: dict[bytes, list[int]] = {}
        for id, piece in enumerate(pieces):
            if piece:
                self._ids.setdefault(piece, []).append(id)

    def missing(self, text: str, count: int, last: int) -> list[list[int]]:
        """Return the lists of ids that may precede a token, at most two. A single list is certain.

        Args:
            text: text of the missing tokens and of the last one.
            count: number of missing tokens.
            last: id of the last token.
        """
        data = text.encode()
        if last >= len(self._pieces) or count > MAX_MISSING or not data.endswith(self._pieces[last]):
            return []
        before = data.removesuffix(self._pieces[last])
        if len(before) > _MAX_TEXT or not is_incomplete(before):
            return []
        return list(islice(self._divisions(before, 0, count), 2))

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens, or None if it ends in the middle of a character."""
        try:
            return b"".join([self._pieces[id] for id in ids]).decode()
        except (IndexError, UnicodeDecodeError):
            return None

    def incomplete(self, ids: Sequence[int]) -> list[bool]:
        """Return, for each token of a completion, whether the text after it is incomplete."""
        text, result = b"", list[bool]()
        for id in ids:
            text = text[-_LONGEST:] + (self._pieces[id] if id < len(self._pieces) else b"")
            result.append(is_incomplete(text))
        return result

    def _divisions(self, data: bytes, start: int, count: int) -> Iterator[list[int]]:
        """Yield each way to split the rest of `data` into `count` tokens after which no character is complete."""
        if count == 0:
            if start == len(data):
                yield []
            return
        for end in range(start + 1, len(data) + 1):
            if is_incomplete(data[:end]):
                for id in self._ids.get(data[start:end], ()):
                    for rest in self._divisions(data, end, count - 1):
                        yield [id, *rest]

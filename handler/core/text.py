"""Token ids to text, piece by piece: characters are never split or doubled, stop strings never leak.

Detokenizer and StopMatcher are fed what arrives and say what is now safe to show (`feed`), the matcher at the end
also what it held back (`flush`).
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Vocabulary:
    """What every token id stands for.

    Args:
        pieces: the raw bytes of each token, indexed by id. A token may hold part of a UTF-8 character.
        special: ids that are control marks, not text (`<|im_end|>`).
    """

    def __init__(self, pieces: Sequence[bytes], special: Collection[int] = ()) -> None:
        self.pieces = pieces
        self.special = frozenset(special)
        self.texts = [_decode(piece) for piece in pieces]
        self.visible = ["" if id in self.special else text for id, text in enumerate(self.texts)]

    def __len__(self) -> int:
        return len(self.pieces)

    def text(self, id: int) -> str:
        """The token by itself, as prompt details show it; a part of a character shows as U+FFFD."""
        text = self.texts[id]
        return self.pieces[id].decode("utf-8", "replace") if text is None else text


def _decode(piece: bytes) -> str | None:
    """The text of a token that is whole by itself, None where it needs its neighbours."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class Prompt(NamedTuple):
    """A prompt as the engine's tokenizer sees it, with the vocabulary that the answer's ids are written in."""

    text: str
    ids: list[int]
    vocabulary: Vocabulary


_SPACES = b" \t\n\r\v\f"
"""What a tokenizer may leave out between words; not the control characters that str.strip() takes for the like."""


def spans(prompt: Prompt) -> list[tuple[int, int]] | None:
    """Where each token stands in the prompt's text: bytes, of whole characters, from and up to.

    A token that the tokenizer put in front has (0, 0). None when the tokens are not pieces of the text: the tokenizer
    changes it first (lower case, NFC), or its vocabulary lacks a byte of it.
    """
    data, pieces, special = prompt.text.encode(), prompt.vocabulary.pieces, prompt.vocabulary.special
    found, at = [], 0
    for id in prompt.ids:
        piece, start = pieces[id], at
        if not data.startswith(piece, at):
            if id in special:
                found.append((0, 0))
                continue
            piece = piece.removeprefix(b" ")  # SentencePiece puts one before the text, `echo` before each word
            start = data.find(piece, at)
            if start < 0 or data[at:start].strip(_SPACES):
                return None
        at = start + len(piece)
        found.append(_whole_characters(data, start, at))
    return None if data[at:].strip(_SPACES) else found


def _whole_characters(data: bytes, start: int, stop: int) -> tuple[int, int]:
    while 0 < start < len(data) and _continues(data[start]):
        start -= 1
    while stop < len(data) and _continues(data[stop]):
        stop += 1
    return start, stop


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character."""
    return byte & 0xC0 == 0x80


class Detokenizer:
    """Ids of one sequence to text.

    A character whose bytes come with several tokens appears with the last of them; one that never becomes whole does
    not appear at all: half a character is not text.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._pieces = vocabulary.pieces
        self._texts = vocabulary.visible if skip_special else vocabulary.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def feed(self, id: int) -> str:
        text = self._texts[id]
        if text is not None and (not self._pending or not text):
            return text
        text = self._decoder.decode(self._pieces[id])
        self._pending = bool(self._decoder.getstate()[0])
        return text


class StopMatcher:
    """Finds the first stop string in text that arrives in any pieces; the outcome does not depend on the pieces.

    The stop string that is complete first wins; of several complete at once, the longest. Where they are shown too
    (`include`), nothing needs to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The text now safe to show: it can no longer be part of a stop string."""
        before = len(self._held) if self._include else 0  # shown already
        self._held += text
        end, start = self._find(self._held)
        if end:
            shown = self._held[before : end if self._include else start]
            self._held, self.matched = "", True
            return shown
        cut = len(self._held) - self._partial(self._held)
        shown, self._held = text if self._include else self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _find(self, text: str) -> tuple[int, int]:
        """(end, start) of the match that ends first, then starts first; (0, 0) without one."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=(0, 0))

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that may grow into a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0

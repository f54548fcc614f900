"""Conversion between token ids and text: vocabulary, prompts, detokenizer and stop strings.

`Detokenizer` and `StopMatcher` have a method `feed` that returns text only once it is safe to show, without incomplete
characters or partial stop strings. At the end, `StopMatcher.flush` returns the text that was held back.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload, PromptTooLong
from handler.core.media import SharedMedia
from handler.core.reasoning import AnswerStart
from handler.core.values import Finish, Request, Sampling, Thoughts, Token, new_token

_SPACES = b" \t\n\r\v\f"
"""Characters that a tokenizer may omit between words. str.strip() would also remove control characters."""

_SLACK = 16  # maximum number of tokens that cutting a text adds


class Vocabulary:
    """The text of every token id.

    Args:
        pieces: raw bytes of each token, indexed by id. A token may be a part of a UTF-8 character.
        special: ids of control tokens, such as `<|im_end|>`.
        texts: text of each token, if known. By default, the pieces are decoded.
    """

    def __init__(
        self, pieces: Sequence[bytes], special: Collection[int] = (), texts: list[str | None] | None = None
    ) -> None:
        self.pieces = pieces
        self.special = frozenset(special)
        self.texts = [_decode(piece) for piece in pieces] if texts is None else texts
        self.visible = self.texts
        if self.special:
            self.visible = ["" if id in self.special else text for id, text in enumerate(self.texts)]

        self._texts: dict[frozenset[str], list[str | None]] = {frozenset(): self.visible}
        self._ids: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def marks(self) -> frozenset[str]:
        """The texts of all special tokens."""
        return frozenset(map(self.text, self.special))

    def showing(self, marks: frozenset[str]) -> list[str | None]:
        """Return the text to show for each id. Special tokens have no text, except those in `marks`."""
        if marks not in self._texts:
            texts = [*self.visible]
            for id in self.special:
                if (text := self.texts[id]) in marks:
                    texts[id] = text
            self._texts[marks] = texts
        return self._texts[marks]

    def text(self, id: int) -> str:
        """Return the text of a single token, as in prompt details. An incomplete character is replaced with U+FFFD."""
        text = self.texts[id]
        return self.decode([id]) if text is None else text

    def ids(self, mark: bytes) -> tuple[int, ...]:
        """Tokenize a marker with the longest match at each position. Return no ids if a position has no match."""
        if mark not in self._ids:
            ids = {piece: id for id, piece in enumerate(self.pieces) if piece and piece in mark}
            result, start = list[int](), 0
            while start < len(mark):
                stop = next((stop for stop in range(len(mark), start, -1) if mark[start:stop] in ids), start)
                if stop == start:
                    result = []
                    break
                result.append(ids[mark[start:stop]])
                start = stop
            self._ids[mark] = tuple(result)
        return self._ids[mark]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of several tokens, including special tokens. U+FFFD replaces incomplete characters."""
        return b"".join([self.pieces[id] for id in ids]).decode("utf-8", "replace")


def _decode(piece: bytes) -> str | None:
    """Decode a token. Return None if it contains an incomplete character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class Prompt(NamedTuple):
    """A prompt as text and token ids, with the vocabulary of the response.

    In the text, the placeholder of an image occurs once. In the ids, it is repeated for each token that the engine
    computes for the image.
    """

    text: str
    ids: list[int]
    vocabulary: Vocabulary
    media: SharedMedia | None = None


def prompt_of_ids(request: Request, ids: Sequence[int], vocabulary: Vocabulary | None) -> Prompt:
    """Return the prompt for token ids that a client sent.

    Args:
        vocabulary: the vocabulary of the model, or None if each prompt has its own vocabulary.

    Raises:
        InvalidPayload: there is no common vocabulary, so the ids have no meaning.
        InvalidParameter: an id is not in the vocabulary.
    """
    if vocabulary is None:
        raise InvalidPayload(f"'{request.names.prompt}': the engine has no vocabulary of its own; send text")
    check_ids(request.names.prompt, ids, vocabulary)
    return Prompt(request.prompt, list(ids), vocabulary)


def check_ids(name: str, ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raise InvalidParameter if an id from the client is not in the vocabulary."""
    for id in ids:
        if not 0 <= id < len(vocabulary):
            raise InvalidParameter(f"{name}: {id} is not in the vocabulary of {len(vocabulary)} tokens")


def cut_after(text: str, part: str) -> str:
    """Cut a rendered chat after the text of its last message, which the response continues.

    Args:
        text: the rendered chat. Templates may strip spaces at the ends of a message.
        part: text of the last message.

    Raises:
        InvalidPayload: the chat does not contain the text of the message.
    """
    stripped = part.strip()
    start = text.rfind(stripped)
    if start < 0:
        raise InvalidPayload("'continue_final_message': the chat template changes the last message's text")
    end = start + len(stripped)
    space = part[len(part.rstrip()) :]
    return text[: end + len(space)] if text.startswith(space, end) else text[:end]


def spans(prompt: Prompt) -> list[tuple[int, int]] | None:
    """Return the start and end of each token in the prompt text, in bytes and extended to whole characters.

    Returns:
        A pair for each token, (0, 0) for a token that the tokenizer added. None if the tokens are not pieces of the
            text, because the tokenizer changed the text (lower case, NFC) or dropped a byte.
    """
    data, pieces, special = prompt.text.encode(), prompt.vocabulary.pieces, prompt.vocabulary.special
    result, end = [], 0
    for id in prompt.ids:
        piece, start = pieces[id], end
        if not data.startswith(piece, end):
            if id in special:
                result.append((0, 0))
                continue
            piece = piece.removeprefix(b" ")  # SentencePiece puts a space before the text, `echo` before each word
            start = data.find(piece, end)
            if start < 0 or data[end:start].strip(_SPACES):
                return None
        end = start + len(piece)
        result.append(_whole_characters(data, start, end))
    return None if data[end:].strip(_SPACES) else result


def _whole_characters(data: bytes, start: int, stop: int) -> tuple[int, int]:
    while 0 < start < len(data) and _continues(data[start]):
        start -= 1
    while stop < len(data) and _continues(data[stop]):
        stop += 1
    return start, stop


def _continues(byte: int) -> bool:
    """Return whether a byte is a continuation byte of UTF-8."""
    return byte & 0xC0 == 0x80


class Detokenizer:
    """Converts the ids of one sequence to text.

    A character that is split into several tokens is returned with the last of these tokens. If it remains incomplete,
    it is never returned.

    Attributes:
        texts: what `feed` returns for each id while `pending` is false; None if `feed` must be called for the id.
        pending: whether the last tokens end with an incomplete character.
    """

    __slots__ = ("_decoder", "_pieces", "pending", "texts")

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special: bool = True, marks: frozenset[str] = frozenset()
    ) -> None:
        self._pieces = vocabulary.pieces
        self._decoder: codecs.IncrementalDecoder | None = None  # few sequences ever split a character
        self.texts = vocabulary.showing(marks) if skip_special else vocabulary.texts
        self.pending = False

    def feed(self, id: int) -> str:
        text = self.texts[id]
        if text is not None and (not self.pending or not text):
            return text
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._decoder.decode(self._pieces[id])
        self.pending = bool(self._decoder.getstate()[0])
        return text


class StopMatcher:
    """Finds the first stop string in text that arrives in chunks.

    The stop string that ends first wins. If several end at the same position, the longest wins.

    Args:
        stops: stop strings.
        include: whether the stop string is shown. No text is held back in that case.
        thoughts: markers of the reasoning, in which stop strings are ignored.

    Attributes:
        matched: the stop string that was found, or "".
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False, thoughts: Thoughts | None = None) -> None:
        self._start = AnswerStart(thoughts) if thoughts is not None and thoughts.end else None
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched = ""

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Add a chunk of text, and return the text that can be shown now.

        Args:
            may_end: whether a stop string may end in this chunk. Otherwise, a stop string can only begin in it.
        """
        if self._start is not None:
            thought, answer = self._start.feed(text)
            if answer is None:
                return thought
            self._start = None
            return thought + self.feed(answer, may_end=may_end)
        num_held = len(self._held)
        num_sent = num_held if self._include else 0
        self._held += text
        end, start = self._find(self._held, num_held) if may_end else (0, 0)
        if end:
            safe = self._held[num_sent : end if self._include else start]
            self._held, self.matched = "", self._held[start:end]
            return safe
        cut = len(self._held) - partial_mark(self._held, self._stops)
        safe, self._held = text if self._include else self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """Return the text that was held back."""
        if self._start is not None:
            return self._start.flush()
        held, self._held = self._held, ""
        return "" if self._include else held

    def _find(self, text: str, num_before: int) -> tuple[int, int]:
        """Return the end and the start of the winning stop string, or (0, 0) if no stop string occurs.

        Args:
            num_before: the number of leading characters. Stop strings that end within them do not count.
        """
        starts = [(stop, text.find(stop, max(num_before + 1 - len(stop), 0))) for stop in self._stops]
        return min(((start + len(stop), start) for stop, start in starts if start >= 0), default=(0, 0))


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest incomplete marker at the end of `text`."""
    longest = 0
    for mark in marks:
        if mark[:1] in text[1 - len(mark) :]:
            sizes = range(min(len(mark) - 1, len(text)), longest, -1)
            longest = next((size for size in sizes if mark.startswith(text[-size:])), longest)
    return longest


def check_tokens(text: str, name: str, limit: int, size: int, count: Callable[[str], int]) -> None:
    """Refuse a long text if it has too many tokens. The text is tokenized part by part.

    Args:
        name: name of the text in the client request.
        limit: maximum number of tokens.
        size: number of characters in a part. Shorter texts are not checked.
        count: returns the number of tokens of a part.

    Raises:
        PromptTooLong: the text has more tokens than `limit`.
    """
    if len(text) <= size:
        return
    num_tokens = 0
    for start in range(0, len(text), size):
        num_tokens += max(0, count(text[start : start + size]) - _SLACK)
        if num_tokens > limit:
            raise PromptTooLong(name, num_tokens, limit, exact=False)


# -- state of one sequence, which converts generated ids to tokens with text -------------------------------------------


class _NoTexts(Sequence[None]):
    """The `texts` of a sequence for which `push` must be called with every id."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, id: Any) -> Any:
        return None


_NO_TEXTS = _NoTexts()


class SequenceState:
    """Converts the ids of one sequence to tokens with text, and finds the end of the sequence.

    Stop strings are detected here, so that they work in the same way with all engines. When a stop string ends the
    sequence, the caller cancels it in the engine. As in vLLM, a stop string that ends within the first `min_new_tokens`
    tokens has no effect. The response is the concatenated text of all tokens. It never contains the token that ended
    the sequence, even if it shows special tokens, unless `include_stop` is set.

    Attributes:
        texts: the text of each id, or None if `push` must be called. It is None for all ids if the request has
            stop strings, if it hides stop tokens, or if the last tokens end with an incomplete character.
        special: ids of control tokens.
        stopped: the stop string that has ended the sequence, or "".
    """

    __slots__ = (
        "_detokenizer",
        "_ending",
        "_hides_end",
        "_num_protected",
        "_stops",
        "_visible_ends",
        "_vocabulary",
        "_watched",
        "special",
        "stopped",
        "texts",
    )

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self._detokenizer = Detokenizer(
            prompt.vocabulary, skip_special=sampling.skip_special_tokens, marks=sampling.marks
        )
        self._vocabulary = prompt.vocabulary
        self.special = prompt.vocabulary.special
        self._stops = (
            StopMatcher(sampling.stop, include=sampling.include_stop, thoughts=sampling.thoughts)
            if sampling.stop
            else None
        )
        self._num_protected = sampling.min_new_tokens  # tokens to come in which no stop string may end
        self._ending = frozenset() if sampling.include_stop else frozenset(sampling.stop_token_ids)
        self._hides_end = not sampling.include_stop and not sampling.skip_special_tokens
        self._visible_ends = sampling.marks
        self._watched = self._stops is not None or bool(self._ending)
        self.texts = self._texts()
        self.stopped = ""

    def _texts(self) -> Sequence[str | None]:
        return _NO_TEXTS if self._watched or self._detokenizer.pending else self._detokenizer.texts

    def push(self, id: int, logprob: float | None) -> Token:
        """Add an id and return its token. A stop string sets `stopped`. Pass the engine's last id to `feed` instead."""
        text = "" if id in self._ending else self._detokenizer.feed(id)
        if self._stops is not None:
            text = self._stops.feed(text, may_end=self._num_protected <= 0)
            self._num_protected -= 1
            self.stopped = self._stops.matched
        self.texts = self._texts()
        return new_token((id, text, logprob, id in self.special, ()))

    def feed(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        finish: Finish | None,
        tops: Sequence[Sequence[tuple[int, float]]] | None = None,
    ) -> tuple[list[Token], Finish | None]:
        """Add ids. Return them as tokens, and the finish reason if the sequence has ended.

        Args:
            ids: new token ids; may be empty if `finish` is not None.
            logprobs: log-probability of each id.
            finish: reason for which the engine ended the sequence after these ids, or None.
            tops: most likely alternatives to each id.
        """
        tokens: list[Token] = []
        end = len(ids) - 1 if finish is Finish.EOS and self._hides_end else -1
        for index, (id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            text = "" if index == end and self._is_hidden_end(id) else self.texts[id]
            token = self.push(id, logprob) if text is None else new_token((id, text, logprob, id in self.special, ()))
            tokens.append(token if tops is None else token._replace(top=alternatives(self._vocabulary, tops[index])))
            if self.stopped:
                return tokens, Finish.STOP
        if finish is not None:
            self._flush(tokens)
        return tokens, finish

    def _is_hidden_end(self, id: int) -> bool:
        """Return whether a token that ends the sequence has no text. Parsers need the ends that are their markers."""
        return id in self.special and self._vocabulary.text(id) not in self._visible_ends

    def _flush(self, tokens: list[Token]) -> None:
        """Append the text that was held back to the last token."""
        text = self._stops.flush() if self._stops is not None else ""
        if not text:
            return
        if tokens:
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + text)
        else:  # the engine ended the sequence without a token
            tokens.append(Token(-1, text, None, False))


def alternatives(vocabulary: Vocabulary, top: Sequence[tuple[int, float]]) -> tuple[Token, ...]:
    """Convert the ids and log-probabilities of the alternatives to a token into tokens."""
    return tuple(Token(id, vocabulary.text(id), logprob, id in vocabulary.special) for id, logprob in top)


def prompt_tokens(
    prompt: Prompt, logprobs: Sequence[float | None], tops: Sequence[Sequence[tuple[int, float]]] | None
) -> list[Token]:
    """Convert the ids of a prompt to tokens.

    Args:
        logprobs: log-probability of each id.
        tops: most likely alternatives to each id.
    """
    vocabulary = prompt.vocabulary
    return [
        Token(id, vocabulary.text(id), logprob, id in vocabulary.special, alternatives(vocabulary, top))
        for id, logprob, top in zip(prompt.ids, logprobs, tops or [()] * len(prompt.ids), strict=True)
    ]

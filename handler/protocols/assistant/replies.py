"""Base of the replies that render an answer's events in blocks (Anthropic) or items (OpenAI's responses)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from handler.core.errors import ServingError
from handler.core.framing import SSE
from handler.core.values import NO_TOKEN, Delta, Finish, Token
from handler.protocols.assistant.answer import AnswerForm, AnswerReader
from handler.protocols.assistant.events import Event
from handler.protocols.kernel.reply import SequenceOutput


class BlockStream(ABC):
    """Server-sent events: the head, those of each token, and the end."""

    content_type = SSE.content_type

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._reader: AnswerReader | None = None
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._begun = False
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._reader = self._form.reader()  # what a prompt leaves open is known now

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            self.finished = True
            return self._failed(delta.error)
        chunks = [] if self._begun else [self._start()]
        self._begun = True
        if delta.finish is None:
            return b"".join([*chunks, *map(self._token, delta.tokens)])
        *tokens, last = delta.tokens or (NO_TOKEN,)
        chunks += [self._token(token) for token in tokens]
        self.finished = True
        return b"".join([*chunks, self._token(last, is_last=True), self._end(delta.finish)])

    @property
    def _num_thoughts(self) -> int:
        return self._reader.num_thoughts if self._reader is not None else 0

    @abstractmethod
    def _failed(self, error: ServingError) -> bytes:
        """Render the end of a stream that broke off."""

    @abstractmethod
    def _start(self) -> bytes: ...

    @abstractmethod
    def _token(self, token: Token, *, is_last: bool = False) -> bytes:
        """Render a token; the last one may have no text."""

    @abstractmethod
    def _end(self, finish: Finish) -> bytes: ...


class AnswerEvents(NamedTuple):
    """The events of a whole answer, and its numbers of tokens."""

    events: Sequence[Event]
    num_tokens: int
    num_thoughts: int


def read_whole(form: AnswerForm, sequence: SequenceOutput) -> AnswerEvents:
    reader = form.reader()
    events: Sequence[Event] = [sequence.text] if reader is None else reader.read(sequence.tokens, sequence.finish)[0]
    num_tokens = sum(token.id >= 0 for token in sequence.tokens)
    return AnswerEvents(events, num_tokens, reader.num_thoughts if reader is not None else 0)

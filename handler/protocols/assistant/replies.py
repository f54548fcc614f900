"""Base of the replies that render an answer's events in blocks (Anthropic) or items (OpenAI's responses)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from handler.core.framing import SSE
from handler.protocols.assistant.answer import AnswerForm, AnswerReader
from handler.protocols.assistant.events import Event
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.kernel.stream import TokenStream


class BlockStream(TokenStream):
    """Server-sent events of one answer, which a reader reads where it is more than text."""

    def __init__(self, errors: ErrorFormat, form: AnswerForm) -> None:
        super().__init__(errors, SSE)
        self._form = form
        self._reader: AnswerReader | None = None

    def start(self, index: int, num_prompt_tokens: int) -> None:
        super().start(index, num_prompt_tokens)
        self._reader = self._form.reader()  # what a prompt leaves open is known now

    @property
    def _num_thoughts(self) -> int:
        return self._reader.num_thoughts if self._reader is not None else 0


class AnswerEvents(NamedTuple):
    """The events of a whole answer, and its numbers of tokens."""

    events: Sequence[Event]
    num_tokens: int
    num_thoughts: int


def read_whole(form: AnswerForm, sequence: SequenceOutput) -> AnswerEvents:
    reader = form.reader()
    events: Sequence[Event] = [sequence.text] if reader is None else reader.read(sequence.tokens, sequence.finish)[0]
    return AnswerEvents(events, sequence.num_tokens, reader.num_thoughts if reader is not None else 0)

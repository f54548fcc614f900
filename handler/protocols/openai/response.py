"""The common parts of OpenAI's chat and text answers: head, token counts, the course of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.framing import JSON, JSON_TEXTS, NUMBER, SLOT, SSE_DONE, Framing, fill, template
from handler.core.identifiers import new_digits
from handler.core.values import NO_TOKEN, Delta, Finish, Token
from handler.protocols.kernel.base import ErrorFormat, TokenLine
from handler.protocols.kernel.reply import SequenceOutput, WholeReply
from handler.protocols.openai.answers import TokenUsage
from handler.protocols.openai.errors import ERRORS

REASONS: Mapping[Finish | None, str | None] = {
    None: None,
    Finish.EOS: "stop",
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ERROR: "stop",
}


class Head(NamedTuple):
    """The fields of an answer that are the same in all of its chunks."""

    id: str
    created: int
    model: str = ""
    fingerprint: str = ""

    def value(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def identity(prefix: str) -> tuple[str, int]:
    """Return a new id, and the time of the request."""
    return f"{prefix}-{new_digits()}", int(time.time())


class Usage(NamedTuple):
    """`stream_options`: report token counts at a stream's end, or in every chunk.

    Attributes:
        null: chunks without a count have `"usage": null`, as TGI's chats always do.
    """

    at_end: bool = False
    always: bool = False
    null: bool = False


def usage(num_prompt_tokens: int, num_tokens: int, num_thoughts: int | None = None) -> TokenUsage:
    """Return the counts; `num_thoughts` are the tokens of thoughts, None where these are not separated."""
    counts: TokenUsage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    if num_thoughts is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
    return counts


_COUNTS: TokenUsage = {"prompt_tokens": NUMBER, "completion_tokens": NUMBER, "total_tokens": NUMBER}


class Choice:
    """The state of one choice in a stream.

    `text_event` is the template of a chunk that brings nothing but text, or of its part where chunks have counts.
    It is None until the choice has begun, and where more than the text changes.
    """

    __slots__ = ("begun", "index", "text_event")

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.text_event: bytes | None = None


class Stream:
    """A chunk a token, each of one choice; then `usage` on demand, and `[DONE]`.

    Subclasses render a choice's part of a chunk.

    Args:
        num_sequences: sequences of each request.
    """

    kind = ""

    def __init__(
        self,
        head: Head,
        choices: Sequence[Choice],
        num_sequences: int,
        wanted: Usage,
        framing: Framing = SSE_DONE,
        errors: ErrorFormat = ERRORS,
    ) -> None:
        self.content_type = framing.content_type
        self._framing = framing
        self._errors = errors
        self._head = head
        self._choices = choices
        self._num_sequences = num_sequences
        self._usage = wanted
        counts = {} if not (wanted.always or wanted.null) else {"usage": _COUNTS if wanted.always else None}
        self._event = template(framing.encode({**head.value(self.kind, [SLOT]), **counts}))
        self._is_text = not wanted.always  # a token's text alone makes its chunk, by `Choice.text_event`
        self._unfinished = len(choices)
        self._num_prompt_tokens = 0
        self._num_tokens = 0  # of all choices
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        choice = self._choices[index * self._num_sequences + delta.sequence]
        event = choice.text_event
        if event is not None and delta.finish is None and self._is_text:  # nearly all
            self._num_tokens += len(delta.tokens)
            return fill(event, delta.tokens)
        if delta.error is not None:
            self.finished = True
            return self._framing.encode(self._errors.tail(delta.error)) + self._framing.end
        prefill = delta.prefill or ()
        if delta.finish is None:
            return b"".join([self._next(choice, token, None, prefill) for token in delta.tokens])
        *tokens, last = delta.tokens or (NO_TOKEN,)
        chunks = [self._next(choice, token, None, prefill) for token in tokens]
        chunks.append(self._next(choice, last, delta.finish, prefill))
        self._unfinished -= 1
        self.finished = not self._unfinished
        if self.finished:
            chunks.append(self._end())
        return b"".join(chunks)

    def token_line(self) -> TokenLine | None:
        event = self._choices[0].text_event
        if event is None or not self._is_text or len(self._choices) > 1:
            return None

        def line(token: Token) -> bytes:
            self._num_tokens += 1
            return event % JSON_TEXTS[token.text]

        return line

    def _next(self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]) -> bytes:
        """Encode the chunk of a token; possibly none.

        Args:
            finish: why the choice ends with it.
            prefill: the prompt's tokens, when the client asks for them.
        """
        self._num_tokens += token.id >= 0
        if choice.text_event is not None and finish is None:
            return self._text_chunk(choice.text_event, token.text)
        part = self._part(choice, token, finish, () if choice.begun else prefill)
        if part is None:
            return b""
        choice.begun = True
        if self._is_plain and finish is None:
            text_part = JSON.encode(self._text_part(choice, SLOT))
            choice.text_event = template(text_part if self._usage.always else self._chunk(text_part))
        return self._chunk(JSON.encode(part))

    def _text_chunk(self, event: bytes, text: str) -> bytes:
        data = event % JSON_TEXTS[text]
        return self._chunk(data) if self._usage.always else data

    @property
    def _is_plain(self) -> bool:
        """Whether parts with text differ in nothing else."""
        raise NotImplementedError

    def _text_part(self, choice: Choice, text: str) -> Mapping[str, Any]:
        """Render the part of a choice that brings nothing but text."""
        raise NotImplementedError

    def _part(
        self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]
    ) -> Mapping[str, Any] | None:
        """Render the part of a choice; None: nothing yet. Only its first part shows `prefill`."""
        raise NotImplementedError

    def _chunk(self, part: bytes) -> bytes:
        """Put a choice's part into a chunk."""
        if not self._usage.always:
            return self._event % part
        num_prompt_tokens, num_tokens = self._num_prompt_tokens, self._num_tokens
        return self._event % (part, num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens)

    def _end(self) -> bytes:
        chunk = b""
        if self._usage.at_end:
            chunk = self._framing.encode({**self._head.value(self.kind, []), "usage": self._count()})
        return chunk + self._framing.end

    def _count(self) -> TokenUsage:
        return usage(self._num_prompt_tokens, self._num_tokens, self._count_thoughts())

    def _count_thoughts(self) -> int | None:
        """Count the tokens of thoughts; None where these are not separated."""
        return None


class WholeAnswer(WholeReply):
    """A whole answer as one object. Subclasses render the choices.

    Args:
        num_sequences: sequences of each request.
    """

    kind = ""

    def __init__(self, head: Head, num_requests: int, num_sequences: int) -> None:
        super().__init__(num_requests * num_sequences)
        self._head = head
        self._each = num_sequences

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        return self._sequences[index * self._each + delta.sequence]

    def _document(self) -> dict[str, Any]:
        num_tokens = sum(token.id >= 0 for sequence in self._sequences for token in sequence.tokens)
        head = self._head.value(self.kind, self._choices())
        return {**head, "usage": usage(self._num_prompt_tokens, num_tokens, self._count_thoughts())}

    def _count_thoughts(self) -> int | None:
        """Count the tokens of thoughts, after the choices were rendered; None where these are not separated."""
        return None

    def _choices(self) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError

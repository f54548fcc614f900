"""The common parts of OpenAI's chat and text answers: head, token counts, the course of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from handler.core.framing import JSON, JSON_TEXTS, NUMBER, SLOT, SSE_DONE, Framing, template
from handler.core.identifiers import new_digits
from handler.core.values import Delta, Finish, Token
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import SequenceOutput, WholeReply
from handler.protocols.kernel.stream import TokenStream
from handler.protocols.openai.answers import AnswerHead, StreamUsage, TokenUsage
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

    def value(self, kind: str) -> AnswerHead:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
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


def usage(
    num_prompt_tokens: int, num_tokens: int, num_thoughts: int | None = None, num_cached_tokens: int = 0
) -> TokenUsage:
    """Return the counts.

    Args:
        num_thoughts: the tokens of thoughts; None where these are not separated.
        num_cached_tokens: those of the prompts that the engine had computed before, if it says so.
    """
    counts: TokenUsage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    if num_thoughts is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
    if num_cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
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


C = TypeVar("C", bound=Choice)


class Stream(TokenStream, Generic[C]):
    """A chunk a token, each of one choice; then `usage` on demand, and `[DONE]`.

    Subclasses render a choice's part of a chunk.

    Args:
        choices: those of each request in turn.
    """

    def __init__(
        self,
        head: Head,
        choices: Sequence[C],
        wanted: Usage,
        num_requests: int = 1,
        framing: Framing = SSE_DONE,
        errors: ErrorFormat = ERRORS,
    ) -> None:
        super().__init__(errors, framing, num_requests, len(choices) // num_requests)
        self._fields = head
        self._choices = choices
        self._usage = wanted
        counts: StreamUsage = {"usage": _COUNTS if wanted.always else None} if wanted.always or wanted.null else {}
        self._event = template(framing.encode(self._value([SLOT], counts)))
        self._is_text = not wanted.always  # a token's text alone makes its chunk, by `Choice.text_event`

    def _token(self, place: int, token: Token) -> bytes:
        choice = self._choices[place]
        if choice.text_event is not None:
            return self._text_chunk(choice.text_event, token.text)
        return self._begin(choice, place, token)

    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        part = self._part(self._choices[place], token, finish)
        return b"" if part is None else self._chunk(JSON.encode(part))

    def _begin(self, choice: C, place: int, token: Token) -> bytes:
        """Encode the chunk of a token, and find out whether those to come differ from it in their text alone."""
        part = self._part(choice, token, None)
        if part is None:
            return b""
        choice.begun = True
        if self._is_plain:
            text_part = JSON.encode(self._text_part(choice, SLOT))
            choice.text_event = template(text_part if self._usage.always else self._chunk(text_part))
            self._events[place] = choice.text_event if self._is_text else None
        return self._chunk(JSON.encode(part))

    def _text_chunk(self, event: bytes, text: str) -> bytes:
        data = event % JSON_TEXTS[text]
        return self._chunk(data) if self._usage.always else data

    def _value(self, choices: list[Any], counts: StreamUsage) -> Mapping[str, object]:
        """Render a chunk."""
        raise NotImplementedError

    @property
    def _is_plain(self) -> bool:
        """Whether parts with text differ in nothing else."""
        raise NotImplementedError

    def _text_part(self, choice: C, text: str) -> Mapping[str, Any]:
        """Render the part of a choice that brings nothing but text."""
        raise NotImplementedError

    def _part(self, choice: C, token: Token, finish: Finish | None) -> Mapping[str, Any] | None:
        """Render the part of a choice; None: nothing yet.

        Args:
            finish: why the choice ends with the token.
        """
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
            counts = usage(self._num_prompt_tokens, self._num_tokens, self._count_thoughts(), self._num_cached_tokens)
            chunk = self._framing.encode(self._value([], {"usage": counts}))
        return chunk + self._framing.end

    def _count_thoughts(self) -> int | None:
        """Count the tokens of thoughts; None where these are not separated."""
        return None


class WholeAnswer(WholeReply):
    """A whole answer as one object, which subclasses render.

    Args:
        num_sequences: sequences of each request.
    """

    def __init__(self, head: Head, num_requests: int, num_sequences: int, framing: Framing = JSON) -> None:
        super().__init__(num_requests * num_sequences, framing=framing)
        self._head = head
        self._each = num_sequences

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        return self._sequences[index * self._each + delta.sequence]

    def _usage(self, num_thoughts: int | None = None) -> TokenUsage:
        """Return the counts; `num_thoughts` as in `usage`."""
        num_tokens = sum(sequence.num_tokens for sequence in self._sequences)
        num_cached_tokens = sum(first.extras.num_cached_tokens or 0 for first in self._sequences[:: self._each])
        return usage(self._num_prompt_tokens, num_tokens, num_thoughts, num_cached_tokens)

"""The common parts of OpenAI's chat and text answers: head, token counts, the course of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import ServingError
from handler.core.framing import JSON, SSE_DONE, Framing, around
from handler.core.values import NO_TOKEN, Delta, Finish, Token, new_uuid
from handler.protocols.base import HttpResponse
from handler.protocols.openai import errors
from handler.protocols.openai.answers import TokenUsage
from handler.protocols.reply import SequenceOutput, WholeReply

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
    return f"{prefix}-{new_uuid().hex}", int(time.time())


class Usage(NamedTuple):
    """`stream_options`: report token counts at a stream's end, or in every chunk.

    Attributes:
        null: chunks without a count have `"usage": null`, as TGI's chats always do.
    """

    at_end: bool = False
    always: bool = False
    null: bool = False


def usage(num_prompt_tokens: int, num_tokens: int) -> TokenUsage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


class Choice:
    """The state of one choice in a stream.

    `around` are the bytes before and after the text of a chunk, once nothing but the text changes.
    """

    __slots__ = ("around", "begun", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.around: tuple[bytes, bytes] | None = None


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
    ) -> None:
        self.content_type = framing.content_type
        self._framing = framing
        self._head = head
        self._choices = choices
        self._num_sequences = num_sequences
        self._usage = wanted
        self._unfinished = len(choices)
        self._num_prompt_tokens = 0
        self._num_tokens = 0  # of all choices
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            self.finished = True
            return self._failure(delta.error)
        choice = self._choices[index * self._num_sequences + delta.sequence]
        around = choice.around
        if around is not None and delta.finish is None and len(delta.tokens) == 1:  # the hot path: all but the text is
            self._num_tokens += 1  # always the same
            return around[0] + JSON.encode(delta.tokens[0].text) + around[1]
        return self._chunks(choice, delta)

    def _chunks(self, choice: Choice, delta: Delta) -> bytes:
        tokens = delta.tokens or ((NO_TOKEN,) if delta.finish is not None else ())
        last = len(tokens) - 1
        chunks = []
        for index, token in enumerate(tokens):
            self._num_tokens += token.id >= 0
            prefill = delta.prefill or () if not choice.begun else ()
            part = self._part(choice, token, delta.finish if index == last else None, prefill)
            if part is not None:
                chunks.append(self._chunk(part))
                choice.begun = True
        if delta.finish is not None:
            self._unfinished -= 1
            self.finished = not self._unfinished
            if self.finished:
                chunks.append(self._end())
        elif choice.begun and choice.around is None and self._is_plain:
            choice.around = around(lambda text: self._chunk(self._text_part(choice, text)))
        return b"".join(chunks)

    @property
    def _is_plain(self) -> bool:
        """Whether every part is text, and nothing else differs."""
        raise NotImplementedError

    def _text_part(self, choice: Choice, text: str) -> Mapping[str, Any]:
        """Render the part of a choice that brings nothing but text."""
        raise NotImplementedError

    def _part(
        self, choice: Choice, token: Token, finish: Finish | None, prefill: Sequence[Token]
    ) -> Mapping[str, Any] | None:
        """Render the part of a choice; None: nothing yet.

        Args:
            prefill: the prompt's tokens, on a choice's first part, when the client asks for them.
        """
        raise NotImplementedError

    def _chunk(self, part: Mapping[str, Any]) -> bytes:
        value = self._head.value(self.kind, [part])
        if self._usage.always:
            value["usage"] = self._count()
        elif self._usage.null:
            value["usage"] = None
        return self._framing.encode(value)

    def _end(self) -> bytes:
        chunk = b""
        if self._usage.at_end:
            chunk = self._framing.encode({**self._head.value(self.kind, []), "usage": self._count()})
        return chunk + self._framing.end

    def _count(self) -> TokenUsage:
        return usage(self._num_prompt_tokens, self._num_tokens)

    def _failure(self, error: ServingError) -> bytes:
        """Render the end of a stream that broke off."""
        return errors.stream_end(error)

    def refused(self, error: ServingError) -> HttpResponse:
        return errors.refused(error)


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
        return {**self._head.value(self.kind, self._choices()), "usage": usage(self._num_prompt_tokens, num_tokens)}

    def _choices(self) -> Sequence[Mapping[str, Any]]:
        raise NotImplementedError

    def refused(self, error: ServingError) -> HttpResponse:
        return errors.refused(error)

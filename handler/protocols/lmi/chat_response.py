"""Chat completions being written: one object, or a chunk a token."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from handler.core.errors import ServingError
from handler.core.framing import JSON, Framing, around
from handler.core.values import NO_TOKEN, Delta, Finish, Token
from handler.protocols.base import HttpResponse
from handler.protocols.openai.response import Usage, usage
from handler.protocols.reply import SequenceOutput, WholeReply


class Failures(Protocol):
    """How a mode says that something failed."""

    def stream_failure(self, error: ServingError) -> Any:
        """The last value of a stream that broke off."""

    def refused(self, error: ServingError) -> HttpResponse:
        """The answer when nothing has been sent yet."""


class Completion(NamedTuple):
    """What an answer says of itself, and of its tokens."""

    id: str
    created: int
    logprobs: bool = False
    top_logprobs: bool = False

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "choices": choices}

    def probabilities(self, tokens: list[Token]) -> dict[str, Any] | None:
        return {"content": [self._probability(token) for token in tokens if token.id >= 0]} if self.logprobs else None

    def _probability(self, token: Token) -> dict[str, Any]:
        """Of an engine that has no alternatives, the chosen token is the only one, as in LMI."""
        own = _shown(token)
        return {**own, "top_logprobs": ([_shown(one) for one in token.top] or [own]) if self.top_logprobs else []}


def _shown(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()) or None}


_CHUNK = "chat.completion.chunk"


class ChatStream:
    """A chunk a token; the role comes with the first, the reason of the end with the last.

    `usage` comes after them where it was asked for, as OpenAI has it.
    """

    def __init__(self, failures: Failures, completion: Completion, framing: Framing, wanted: Usage) -> None:
        self._failures = failures
        self._completion = completion
        self._framing = framing
        self._usage = wanted
        self._num_prompt_tokens = self._num_tokens = 0
        self._begun = False
        self._around: tuple[bytes, bytes] | None = None  # what stands about the text in a chunk of nothing else
        self.content_type = framing.content_type
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        self.finished = delta.finish is not None
        encode = self._framing.encode
        if delta.error is not None:
            return encode(self._failures.stream_failure(delta.error)) + self._framing.end
        if delta.finish is None:
            if self._around is not None and len(delta.tokens) == 1:  # the hot path: all but the text is always the same
                before, after = self._around
                self._num_tokens += 1
                return before + JSON.encode(delta.tokens[0].text) + after
            chunks = b"".join([encode(self._chunk(token, None)) for token in delta.tokens])
            if self._begun and not self._completion.logprobs and not self._usage.always:
                self._around = around(lambda text: encode(self._chunk(NO_TOKEN._replace(text=text), None)))
            return chunks
        *tokens, last = delta.tokens or (NO_TOKEN,)
        lines = [encode(self._chunk(token, None)) for token in tokens]
        return b"".join([*lines, encode(self._chunk(last, delta.finish)), self._end()])

    def _chunk(self, token: Token, finish: Finish | None) -> dict[str, Any]:
        self._num_tokens += token.id >= 0
        delta = {"content": token.text}
        if not self._begun:
            self._begun, delta["role"] = True, "assistant"
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._completion.probabilities([token]),
            "finish_reason": None if finish is None else finish.value,
        }
        value = self._completion.object(_CHUNK, [choice])
        if self._usage.at_end:
            value["usage"] = self._count() if self._usage.always else None
        return value

    def _end(self) -> bytes:
        if not self._usage.at_end:
            return self._framing.end
        value = {**self._completion.object(_CHUNK, []), "usage": self._count()}
        return self._framing.encode(value) + self._framing.end

    def _count(self) -> dict[str, int]:
        return usage(self._num_prompt_tokens, self._num_tokens)

    def refused(self, error: ServingError) -> HttpResponse:
        return self._failures.refused(error)


class ChatDocument(WholeReply):
    """One object; the choices are in the order of their seeds."""

    def __init__(self, failures: Failures, completion: Completion, num_sequences: int) -> None:
        super().__init__(num_sequences)
        self._failures = failures
        self._completion = completion

    def _document(self) -> dict[str, Any]:
        choices = [self._choice(sequence) for sequence in self._sequences]
        num_tokens = sum(token.id >= 0 for sequence in self._sequences for token in sequence.tokens)
        count = usage(self._num_prompt_tokens, num_tokens)
        return {**self._completion.object("chat.completion", choices), "usage": count}

    def _choice(self, sequence: SequenceOutput) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "message": {"role": "assistant", "content": sequence.text},
            "logprobs": self._completion.probabilities(sequence.tokens),
            "finish_reason": sequence.finish.value,
        }

    def refused(self, error: ServingError) -> HttpResponse:
        return self._failures.refused(error)

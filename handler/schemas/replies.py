"""One client's answer being written, as a stream of lines or as one document; a layout says how values look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from handler.core import NO_TOKEN, Delta, Finish, Request, Sampling, Token
from handler.errors import ServingError
from handler.framing import JSON, Framing
from handler.schemas.base import Answer


class Layout(Protocol):
    """The values of a dialect (`lmi.Lmi`, `tgi.TgiCompat`)."""

    def prompt_token(self, token: Token) -> dict[str, Any]:
        """A token of `prefill`."""

    def chunk(self, token: Token, index: int) -> dict[str, Any]:
        """A line of a stream that is not the last."""

    def last_chunk(self, token: Token, index: int, text: str, details: dict[str, Any] | None) -> dict[str, Any]:
        """The last line of a stream."""

    def stream_details(
        self, request: Request, finish: Finish, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, Any]:
        """`details` of the last line."""

    def stream_failure(self, error: ServingError) -> Any:
        """The last line of a stream that broke off."""

    def details(self, request: Request, best: Continuation, others: Sequence[Continuation]) -> dict[str, Any]:
        """`details` of a document."""

    def document(self, text: str, details: dict[str, Any] | None) -> Any:
        """A whole answer."""

    def refused(self, error: ServingError) -> Answer:
        """The answer when nothing has been sent yet."""


class Continuation:
    """One sequence of a whole answer, as far as it has come; `index` numbers those of one request."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.tokens: list[Token] = []
        self.prefill: Sequence[Token] = ()
        self.finish = Finish.ERROR

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])

    @property
    def logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.tokens)


class StreamReply:
    """A stream of lines, one a token."""

    def __init__(self, layout: Layout, request: Request, framing: Framing) -> None:
        self._layout = layout
        self._request = request
        self._chunk = layout.chunk
        self._encode = framing.encode
        self._texts: list[str] = []
        self._num_tokens = 0
        self._num_prompt_tokens = 0
        self._prefill: Sequence[Token] | None = None
        self.content_type = framing.content_type
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.error is not None:
            self.finished = True
            return self._encode(self._layout.stream_failure(delta.error))
        if delta.finish is None and len(delta.tokens) == 1 and delta.prefill is None:  # nearly every delta
            token = delta.tokens[0]
            self._num_tokens += 1
            self._texts.append(token.text)
            return self._encode(self._chunk(token, self._num_tokens))
        if delta.prefill is not None:
            self._prefill = delta.prefill
        if delta.finish is None:
            return b"".join([self._line(token) for token in delta.tokens])
        *tokens, last = delta.tokens or (NO_TOKEN,)
        lines = [self._line(token) for token in tokens]
        return b"".join([*lines, self._encode(self._last(last, delta.finish))])

    def _line(self, token: Token) -> bytes:
        self._num_tokens += 1
        self._texts.append(token.text)
        return self._encode(self._chunk(token, self._num_tokens))

    def _last(self, token: Token, finish: Finish) -> Any:
        self.finished = True
        self._num_tokens += token.id >= 0
        self._texts.append(token.text)
        request = self._request
        text = (request.prompt if request.full_text else "") + "".join(self._texts)
        details = None
        if request.details:
            details = self._layout.stream_details(request, finish, self._num_tokens, self._num_prompt_tokens)
            if self._prefill is not None:
                details["prefill"] = [self._layout.prompt_token(token) for token in self._prefill]
        return self._layout.last_chunk(token, self._num_tokens, text, details)

    def refused(self, error: ServingError) -> Answer:
        return self._layout.refused(error)


class WholeReply:
    """One JSON document, written when all sequences have ended; a subclass says what stands in it."""

    content_type = JSON.content_type

    def __init__(self, num_sequences: int) -> None:
        self._sequences = [Continuation(index) for index in range(num_sequences)]
        self._unfinished = num_sequences
        self._num_prompt_tokens = 0
        self.finished = False

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens

    def feed(self, index: int, delta: Delta) -> bytes:
        assert delta.error is None, "a failed document is written by refused()"
        sequence = self._sequences[delta.sequence]
        sequence.tokens += delta.tokens
        if delta.prefill is not None:
            sequence.prefill = delta.prefill
        if delta.finish is None:
            return b""
        sequence.finish = delta.finish
        self._unfinished -= 1
        self.finished = not self._unfinished
        return JSON.encode(self._document()) if self.finished else b""

    def _document(self) -> Any:
        raise NotImplementedError


class DocumentReply(WholeReply):
    """LMI's and TGI's whole answer."""

    def __init__(self, layout: Layout, request: Request) -> None:
        super().__init__(request.sampling.num_sequences)
        self._layout = layout
        self._request = request

    def _document(self) -> Any:
        logprobs = [sequence.logprob for sequence in self._sequences]
        best, *others = [self._sequences[index] for index in returned(logprobs, self._request.sampling)]
        best.prefill = self._sequences[0].prefill
        request = self._request
        text = (request.prompt if request.full_text else "") + best.text
        details = self._layout.details(request, best, others) if request.details else None
        return self._layout.document(text, details)

    def refused(self, error: ServingError) -> Answer:
        return self._layout.refused(error)


def returned(logprobs: Sequence[float], sampling: Sampling) -> list[int]:
    """The sequences that the client gets, by index, the most probable first; beams come ranked by the engine."""
    ranked = list(range(len(logprobs)))
    if sampling.num_beams == 1:
        ranked.sort(key=lambda index: -logprobs[index])
    return ranked[: sampling.n] if sampling.n > 1 else ranked

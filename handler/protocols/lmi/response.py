"""Renders tokens as LMI responses: a document, or the lines of a stream."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from handler.core.framing import JSON, JSON_TEXTS, JSONLINES, NUMBER, SLOT, TOKEN_SLOTS, Framing, dumps, template
from handler.core.values import NO_TOKEN, Delta, Finish, Request, Token
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.reply import (
    LONG_TEXT,
    SequenceOutput,
    TokenEncoder,
    TokenStream,
    WholeReply,
    finish_of,
    rank_sequences,
)
from handler.protocols.kernel.tensors import Lines, OutputTensors, TensorValues
from handler.protocols.lmi.api import (
    BatchLine,
    BatchText,
    LmiAnswer,
    LmiDetails,
    LmiLine,
    LmiSequence,
    LmiToken,
    LmiTops,
)


@functools.lru_cache
def line_template(chunk: Callable[[Token, int], Any], framing: Framing, slots: Token) -> bytes:
    """Return the template of the lines that `chunk` renders. Its first slot may be the index of the token."""
    return template(framing.encode(chunk(slots, NUMBER)))


class StreamEnd(NamedTuple):
    """The data for `details` in the last line of a stream.

    Attributes:
        prefill: the tokens of the prompt, or None if they are not requested.
        tops: the alternatives to each token. The list is empty if they are not requested.
    """

    request: Request
    finish: Finish
    num_tokens: int
    num_prompt_tokens: int
    prefill: Sequence[Token] | None
    tops: Sequence[Sequence[Token]]


class WholeOutput(NamedTuple):
    """The data for `details` of a non-streaming response."""

    request: Request
    best: SequenceOutput
    others: Sequence[SequenceOutput]
    num_prompt_tokens: int


class ResponseFormat(Protocol):
    """The response format of a dialect, such as `LmiFormat` or `TgiFormat`.

    Attributes:
        special_in_text: whether the whole text includes the text of special tokens.
    """

    special_in_text: bool

    def chunk(
        self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None
    ) -> Mapping[str, object]:
        """Render a line of a stream, except the last one.

        Args:
            tops: whether to include the alternatives to the token.
        """

    def token_encoder(self, framing: Framing, texts: list[str]) -> TokenEncoder:
        """Return an encoder for lines that contain only a token. It runs once per token and is on the hot path.

        The encoder appends each token's part of the whole text to `texts`, whose length is then the index of the token.
        """

    def last_chunk(self, chunk: Any, text: str, end: StreamEnd | None) -> Mapping[str, object]:
        """Render the last line of a stream: the chunk with the whole text, and with details if `end` is not None."""

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> object:
        """Render a non-streaming response, with details if `output` is not None."""


class StreamReply(TokenStream):
    """A stream of lines, one per token."""

    def __init__(
        self,
        format: ResponseFormat,
        request: Request,
        framing: Framing,
        errors: ErrorFormat,
        outputs: OutputTensors | None = None,
    ) -> None:
        super().__init__(errors, framing)
        self._format = format
        self._request = request
        self._special_in_text = format.special_in_text
        self._texts: list[str] = []  # one text per token
        self._prefill: Sequence[Token] | None = None
        self._outputs = None if outputs is None else Lines(outputs)
        self._with_tops = request.sampling.top_logprobs > 0
        self._tops: list[Sequence[Token]] = []
        self._bare = self._outputs is None and not self._with_tops  # a line contains only a token
        self._token_encoder: TokenEncoder | None = None

    def takes_long(self, delta: Delta) -> bool:
        return delta.finish is not None and len(self._request.text_before) > LONG_TEXT

    def token_encoder(self) -> TokenEncoder | None:
        if self._token_encoder is None and self._bare:
            self._token_encoder = self._format.token_encoder(self._framing, self._texts)
        return self._token_encoder

    def _take(self, position: int, delta: Delta) -> None:
        if delta.prefill is not None:
            self._prefill = delta.prefill
        if self._outputs is not None:
            self._outputs.take(delta)

    def _token(self, position: int, token: Token) -> bytes:
        if (encode := self.token_encoder()) is not None:
            return encode(token)
        self._add(token)
        chunk = self._format.chunk(token, len(self._texts), tops=self._with_tops, outputs=self._values(token))
        return self._framing.encode(chunk)

    def _finish(self, delta: Delta) -> Finish:
        return finish_of(self._request, delta) or super()._finish(delta)

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        if token is not NO_TOKEN:
            self._add(token)
        request, num_tokens = self._request, len(self._texts)
        text = request.text_before + "".join(self._texts)
        end = StreamEnd(request, finish, num_tokens, self._num_prompt_tokens, self._prefill, self._tops)
        chunk = self._format.chunk(token, num_tokens, tops=self._with_tops, outputs=self._values(token))
        return self._framing.encode(self._format.last_chunk(chunk, text, end if request.details else None))

    def _add(self, token: Token) -> None:
        self._texts.append(token.text if self._special_in_text or not token.special else "")
        if self._with_tops:
            self._tops.append(token.top)

    def _values(self, token: Token) -> TensorValues | None:
        """Return the output tensors for the line of a token, or None if the request selects none."""
        return None if self._outputs is None else self._outputs.line(token)


class DocumentReply(WholeReply):
    """A non-streaming response in LMI's or TGI's format."""

    def __init__(
        self,
        format: ResponseFormat,
        request: Request,
        outputs: OutputTensors | None = None,
        framing: Framing = JSON,
    ) -> None:
        super().__init__(request.sampling.num_sequences, special_in_text=format.special_in_text, framing=framing)
        self._format = format
        self._request = request
        self._outputs = outputs
        self.num_repeated = len(request.text_before)

    @property
    def shows_logprobs(self) -> bool:
        return self._request.details or self._outputs is not None or self._request.sampling.num_sequences > 1

    def _finish(self, delta: Delta) -> Finish | None:
        return finish_of(self._request, delta)

    def _document(self) -> object:
        best, *others = self._ranked() if len(self._sequences) > 1 else self._sequences
        best.prefill = self._sequences[0].prefill
        request = self._request
        text = request.text_before + best.text
        output = WholeOutput(request, best, others, self._num_prompt_tokens) if request.details else None
        return self._format.document(text, output, self._tensors(self._outputs, [best, *others]))

    def _ranked(self) -> list[SequenceOutput]:
        scores = [self._score(sequence) for sequence in self._sequences]
        return [self._sequences[index] for index in rank_sequences(scores, self._request.sampling)]

    def _score(self, sequence: SequenceOutput) -> float:
        """Return the score by which sequences are ranked."""
        return sequence.logprob


_SPECIAL_SLOTS = TOKEN_SLOTS._replace(special=True)


def line_encoder(chunk: Callable[[Token, int], Any], framing: Framing, texts: list[str]) -> TokenEncoder:
    """Return an encoder for the lines that `chunk` renders, whose text includes special tokens."""
    ordinary, special = (line_template(chunk, framing, slots) for slots in (TOKEN_SLOTS, _SPECIAL_SLOTS))
    add = texts.append

    def line(token: Token) -> bytes:
        id, text, logprob, is_special, _ = token
        add(text)
        return (special if is_special else ordinary) % (id, JSON_TEXTS[text], dumps(logprob))

    return line


class LmiFormat:
    """LMI's response format."""

    special_in_text = True

    def token(self, token: Token) -> LmiToken:
        value: LmiToken = {"id": token.id, "text": token.text, "log_prob": token.logprob}
        if token.special:
            value["special_token"] = True
        return value

    def tokens(self, tokens: Sequence[Token]) -> list[LmiToken]:
        return [self.token(token) for token in tokens]

    def _top_tokens(self, tokens: Sequence[Token]) -> list[list[LmiToken]]:
        return [self.tokens(token.top) for token in tokens]

    def chunk(self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None) -> LmiLine:
        line: LmiLine = {"token": self.token(token)}
        if tops:
            line["top_tokens"] = self.tokens(token.top)
        if outputs is not None:
            line["outputs"] = outputs
        return line

    def token_encoder(self, framing: Framing, texts: list[str]) -> TokenEncoder:
        return line_encoder(self.chunk, framing, texts)

    def last_chunk(self, chunk: LmiLine, text: str, end: StreamEnd | None) -> LmiLine:
        line: LmiLine = {**chunk, "generated_text": text}
        if end is not None:
            line["details"] = self._stream_details(end)
        return line

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> LmiAnswer:
        response: LmiAnswer = {"generated_text": text}
        if output is not None:
            response["details"] = self._details(output)
        if outputs is not None:
            response["outputs"] = outputs
        return response

    def _stream_details(self, end: StreamEnd) -> LmiDetails:
        details: LmiDetails = {
            "finish_reason": end.finish.value,
            "generated_tokens": end.num_tokens,
            "inputs": end.request.prompt,
        }
        if end.prefill is not None:
            details["prefill"] = self.tokens(end.prefill)
        if end.tops:
            details["top_tokens"] = [self.tokens(top) for top in end.tops]
        return details

    def _details(self, output: WholeOutput) -> LmiDetails:
        request, best, others, _ = output
        details: LmiDetails = {
            "finish_reason": best.finish.value,
            "generated_tokens": len(best.tokens),
            "inputs": request.prompt,
            "tokens": self.tokens(best.tokens),
        }
        if request.sampling.prompt_logprobs:
            details["prefill"] = self.tokens(best.prefill)
        if request.sampling.top_logprobs:
            details["top_tokens"] = self._top_tokens(best.tokens)
        if others:
            details["best_of_sequences"] = [self._other(request, other) for other in others]
        return details

    def _other(self, request: Request, other: SequenceOutput) -> LmiSequence:
        """Render a sequence of `best_of_sequences`."""
        tops: LmiTops = {"top_tokens": self._top_tokens(other.tokens)} if request.sampling.top_logprobs else {}
        return {
            "finish_reason": other.finish.value,
            "generated_tokens": len(other.tokens),
            "tokens": self.tokens(other.tokens),
            **tops,
            "generated_text": other.text,
        }


# -- responses of a dynamic batch --------------------------------------------------------------------------------------


class BatchDocument(WholeReply):
    """The non-streaming response of a dynamic batch, with one text per prompt."""

    shows_logprobs = False

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(len(requests))
        self._requests = requests
        self.num_repeated = sum(len(request.text_before) for request in requests)

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        return self._sequences[index]

    def _document(self) -> list[BatchText]:
        return [
            {"generated_text": request.text_before + sequence.text}
            for request, sequence in zip(self._requests, self._sequences, strict=True)
        ]


_line: BatchLine = {"outputs": [SLOT]}
_LINE = template(JSONLINES.encode(_line))


class BatchStream(TokenStream):
    """The stream of a dynamic batch. Each line has the next token for every prompt, or "" if its response has ended.

    Responses may advance at different speeds, so a line waits until each of them has a token for it or has ended.
    """

    shows_logprobs = False

    def __init__(self, requests: list[Request], errors: ErrorFormat) -> None:
        super().__init__(errors, JSONLINES, len(requests))
        self._befores = [request.text_before for request in requests]
        self._waiting: list[deque[str]] = [deque() for _ in requests]
        self._ended = [False] * len(requests)

    def _token(self, position: int, token: Token) -> bytes:
        self._put(position, token)
        if len(self._events) == 1:
            self._events[0] = _LINE
        return self._lines()

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        if token is not NO_TOKEN:
            self._put(position, token)
        self._ended[position] = True
        return self._lines()

    def _put(self, position: int, token: Token) -> None:
        before, self._befores[position] = self._befores[position], ""
        self._waiting[position].append(before + token.text)

    def _lines(self) -> bytes:
        """Remove and encode the complete lines, for which every prompt has a token or has ended."""
        lines = []
        while any(self._waiting) and all(map(any, zip(self._waiting, self._ended, strict=True))):
            line: BatchLine = {"outputs": [texts.popleft() if texts else "" for texts in self._waiting]}
            lines.append(JSONLINES.encode(line))
        return b"".join(lines)

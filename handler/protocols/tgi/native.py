"""TGI's own routes `/`, `/generate` and `/generate_stream`, as text-generation-inference 3 has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from handler.core.errors import ServingError
from handler.core.framing import JSON, KEEP_ALIVE, SSE
from handler.core.values import Finish, Request, keep_last
from handler.protocols.kernel.base import Headers, HttpResponse, ParsedRequest, ServerContext, Timing
from handler.protocols.kernel.parameters import Parameter, Table, named, read_all
from handler.protocols.kernel.readers.values import integer
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.lmi.reply import DocumentReply, ResponseFormat, StreamReply
from handler.protocols.tgi.answers import TgiError
from handler.protocols.tgi.errors import SLICE, failure
from handler.protocols.tgi.request import Body, check_limits, read_body, unknown
from handler.protocols.tgi.response import TgiFormat, finish_shown, seed_of

TABLE = Table(
    {
        **named("tgi"),
        "max_new_tokens": Parameter("max_new_tokens", integer(1, (1 << 32) - 1)),
    },
    "parameters.",
)
"""The parameters that shape the answer, once their types and ranges have passed TGI's checks."""

DEFAULTS = {"include_stop": True, "skip_special_tokens": False}
"""Tokens show special tokens, and stop strings match them; the whole text has none."""


class Dialect(ResponseFormat, Protocol):
    """A format whose refusals depend on the request."""

    def failed(
        self, error: ServingError, *, stream: bool, request: Request | None = None, begun: bool = False
    ) -> HttpResponse: ...


class Document(DocumentReply):
    """A whole answer. `best_of` returns the sequence with the highest mean log-probability."""

    def __init__(self, dialect: Dialect, request: Request) -> None:
        super().__init__(dialect, request)
        self._dialect = dialect

    def _score(self, sequence: SequenceOutput) -> float:
        return sequence.mean_logprob

    def refused(self, error: ServingError) -> HttpResponse:
        begun = any(sequence.tokens for sequence in self._sequences)
        return self._dialect.failed(error, stream=False, request=self._request, begun=begun)


class Stream(StreamReply):
    def __init__(self, dialect: Dialect, request: Request) -> None:
        super().__init__(dialect, request, SSE)
        self._dialect = dialect

    def refused(self, error: ServingError) -> HttpResponse:
        return self._dialect.failed(error, stream=True, request=self._request)


class Tgi(TgiFormat):
    """One of TGI's routes.

    Args:
        array: a whole answer is the only element of an array.
        streams: None lets the body decide.
        full_text: the text begins with the prompt by default.
    """

    any_media = False
    special_in_text = False

    def __init__(self, name: str, *, array: bool = False, streams: bool | None = None, full_text: bool = False) -> None:
        self.name = name
        self._array = array
        self._streams = streams
        self._full_text = full_text

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        read = read_body(body)
        stream = read.stream if self._streams is None else self._streams
        check_limits(read, context, stream=stream)
        request = self._request(read, context)
        ignored = unknown(body, context)
        if read.stream and not stream:
            ignored.append("stream")  # this route does not look at it
        own_headers = headers(request, context)
        if stream:

            def failed(error: ServingError) -> bytes:
                return SSE.encode(self.stream_failure(error, request))

            reply = Stream(self, request)
            return ParsedRequest(
                (request,), reply, ignored, True, headers=own_headers, keep_alive=KEEP_ALIVE, failed=failed
            )
        return ParsedRequest((request,), Document(self, request), ignored, headers=own_headers)

    def _request(self, read: Body, context: ServerContext) -> Request:
        given = {name: value for name, value in read.parameters.items() if (name, value) != ("best_of", 0)}
        if given.get("best_of", 1) > 1:  # then the limits saw to it that something says so
            given["do_sample"] = True
        defaults = {**DEFAULTS, "do_sample": not read.has_parameters}
        parameters = read_all(given, context, defaults=defaults, table=TABLE)
        sampling = parameters.sampling.with_seed() if parameters.sampling.do_sample else parameters.sampling
        return Request(
            prompt=read.inputs,
            sampling=sampling,
            truncation=keep_last(given.get("truncate")),
            details=given.get("details", False) or sampling.prompt_logprobs,
            full_text=given.get("return_full_text", self._full_text),
            adapter=parameters.others.get("adapter"),
            fill_context="max_new_tokens" not in given,
            min_free_tokens=SLICE,
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def stream_details(
        self, request: Request, finish: Finish, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, Any]:
        return super().stream_details(request, finish_shown(request, finish, num_tokens), num_tokens, num_prompt_tokens)

    def details(
        self, request: Request, best: SequenceOutput, others: Sequence[SequenceOutput], num_prompt_tokens: int
    ) -> dict[str, Any]:
        value = self._sequence(request, best)
        if others:
            value["best_of_sequences"] = [self._other(request, other) for other in others]
        if request.sampling.top_logprobs:
            value["top_tokens"] = [self.top_tokens(token) for token in best.tokens]
        return value

    def _sequence(self, request: Request, sequence: SequenceOutput) -> dict[str, Any]:
        num_tokens = len(sequence.tokens)
        return {
            "finish_reason": finish_shown(request, sequence.finish, num_tokens).value,
            "generated_tokens": num_tokens,
            "seed": seed_of(request, sequence.index),
            "prefill": [self.prompt_token(token) for token in sequence.prefill],
            "tokens": [self.token(token) for token in sequence.tokens],
        }

    def _other(self, request: Request, other: SequenceOutput) -> dict[str, Any]:
        text = (request.prompt if request.full_text else "") + other.text
        value = {"generated_text": text, **self._sequence(request, other)}
        if request.sampling.top_logprobs:
            value["top_tokens"] = [self.top_tokens(token) for token in other.tokens]
        return value

    def document(self, text: str, details: dict[str, Any] | None, outputs: dict[str, Any] | None = None) -> Any:
        value: dict[str, Any] = {"generated_text": text}
        if details is not None:
            value["details"] = details
        return [value] if self._array else value

    # -- failures ------------------------------------------------------------------------------------------------

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        stream = isinstance(body, dict) and body.get("stream") is True
        return self.failed(error, stream=stream if self._streams is None else self._streams)

    def failed(
        self, error: ServingError, *, stream: bool, request: Request | None = None, begun: bool = False
    ) -> HttpResponse:
        answer = failure(error, request, begun=begun)
        value: TgiError = {"error": answer.error, "error_type": answer.error_type}
        if stream and answer.in_stream:
            return HttpResponse(200, SSE.content_type, SSE.encode(value))
        return HttpResponse(answer.status, JSON.content_type, JSON.encode(value))

    def stream_failure(self, error: ServingError, request: Request | None = None) -> Any:
        answer = failure(error, request, begun=True)
        return {"error": answer.error, "error_type": answer.error_type}


def headers(request: Request, context: ServerContext) -> Callable[[Timing | None], Headers]:
    """Return TGI's headers: times in whole milliseconds, but `x-compute-time` in seconds."""
    start = [("x-compute-type", context.engine), ("x-compute-characters", str(len(request.prompt)))]

    def of(timing: Timing | None) -> Headers:
        return start if timing is None else [*start, *_times(timing)]

    return of


def _times(timing: Timing) -> Headers:
    seconds = {
        "x-total-time": timing.total,
        "x-validation-time": timing.validation,
        "x-queue-time": timing.queue,
        "x-inference-time": timing.inference,
        "x-time-per-token": timing.inference / max(1, timing.num_tokens),
    }
    return [
        ("x-compute-time", f"{timing.total:.6f}"),
        *((name, str(int(value * 1000))) for name, value in seconds.items()),
        ("x-prompt-tokens", str(timing.num_prompt_tokens)),
        ("x-generated-tokens", str(timing.num_tokens)),
    ]

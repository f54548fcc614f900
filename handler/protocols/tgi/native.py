"""TGI's own routes `/`, `/generate` and `/generate_stream`, as text-generation-inference 3 has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handler.core.framing import KEEP_ALIVE, SSE
from handler.core.values import Finish, Request, keep_last
from handler.protocols.kernel.base import Dialect, ParsedRequest, Timing
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.http_response import Headers
from handler.protocols.kernel.parameters import ANY, Parameter, Table, named, read_all
from handler.protocols.kernel.readers.values import integer
from handler.protocols.kernel.reply import SequenceOutput
from handler.protocols.kernel.validation import DEFAULTS as SAMPLING
from handler.protocols.lmi.reply import DocumentReply, StreamReply, WholeOutput
from handler.protocols.tensors.outputs import TensorValues
from handler.protocols.tgi.answers import TgiAnswer, TgiDetails, TgiOthers, TgiOutput, TgiSequence
from handler.protocols.tgi.errors import SLICE, TgiErrors
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


_SHAPING = ("temperature", "top_k", "top_p", "typical_p")


class Document(DocumentReply):
    """A whole answer. `best_of` returns the sequence with the highest mean log-probability."""

    def _score(self, sequence: SequenceOutput) -> float:
        return sequence.mean_logprob

    def has_begun(self) -> bool:
        return any(sequence.tokens for sequence in self._sequences)


class Tgi(TgiFormat, Dialect):
    """One of TGI's routes.

    Args:
        array: a whole answer is the only element of an array.
        streams: None lets the body decide.
        full_text: the text begins with the prompt by default.
    """

    special_in_text = False
    unique_keys = True

    errors: TgiErrors

    def __init__(self, name: str, *, array: bool = False, streams: bool | None = None, full_text: bool = False) -> None:
        self.name = name
        self._array = array
        self._streams = streams
        self._full_text = full_text
        self.errors = TgiErrors(streams=bool(streams))

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        read = read_body(body)
        stream = read.stream if self._streams is None else self._streams
        check_limits(read, context, stream=stream)
        given, lacking = _sampling_inferred(read, context)
        request = self._request(read, given, context)
        ignored = [*unknown(body, context), *lacking]
        if read.stream and not stream:
            ignored.append("stream")  # this route does not look at it
        own_headers = headers(request, context)
        if stream:
            errors = TgiErrors(streams=True, request=request)
            reply = StreamReply(self, request, SSE, errors)
            return ParsedRequest((request,), reply, errors, ignored, True, headers=own_headers, keep_alive=KEEP_ALIVE)
        document = Document(self, request)
        errors = TgiErrors(request=request, has_begun=document.has_begun)
        return ParsedRequest((request,), document, errors, ignored, headers=own_headers)

    def errors_of(self, body: Any, context: ServerContext) -> TgiErrors:
        if self._streams is None and isinstance(body, dict) and body.get("stream") is True:
            return TgiErrors(streams=True)
        return self.errors

    def _request(self, read: Body, given: Mapping[str, Any], context: ServerContext) -> Request:
        parameters = read_all(given, context, defaults={**DEFAULTS, "max_new_tokens": ANY}, table=TABLE)
        sampling = parameters.sampling.with_seed()
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

    def document(
        self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None
    ) -> TgiAnswer | list[TgiAnswer]:
        answer: TgiAnswer = {"generated_text": text}
        if output is not None:
            answer["details"] = self._details(output)
        return [answer] if self._array else answer

    def _finish(self, request: Request, finish: Finish, num_tokens: int) -> str:
        return finish_shown(request, finish, num_tokens).value

    def _details(self, output: WholeOutput) -> TgiDetails:
        request, best, others, _ = output
        told = self._sequence(request, best)
        more: TgiOthers = {"best_of_sequences": [self._other(request, other) for other in others]} if others else {}
        return {**told, **more, **self._tops(request, best)}

    def _sequence(self, request: Request, sequence: SequenceOutput) -> TgiOutput:
        num_tokens = len(sequence.tokens)
        return {
            "finish_reason": self._finish(request, sequence.finish, num_tokens),
            "generated_tokens": num_tokens,
            "seed": seed_of(request, sequence.index),
            "prefill": self.prefill(sequence.prefill),
            "tokens": self.tokens(sequence.tokens),
        }

    def _other(self, request: Request, other: SequenceOutput) -> TgiSequence:
        text = (request.prompt if request.full_text else "") + other.text
        return {"generated_text": text, **self._sequence(request, other), **self._tops(request, other)}


def _sampling_inferred(read: Body, context: ServerContext) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters with `do_sample` as TGI's shards decide it: whatever shapes the distribution samples.

    They do so though `do_sample` be false, and clients send it so beside `typical_p` (LangChain). Where nobody asks for
    samples in so many words, shapes that the engine lacks are left out, and their names returned.
    """
    given = {name: value for name, value in read.parameters.items() if (name, value) != ("best_of", 0)}
    asked = given.get("do_sample", not read.has_parameters) or given.get("best_of", 1) > 1
    shapes = [] if asked else [name for name in _SHAPING if given.get(name) not in (None, SAMPLING[name])]
    lacking = [name for name in shapes if name in context.unsupported]
    for name in lacking:
        del given[name]
    given["do_sample"] = asked or len(shapes) > len(lacking)
    return given, [f"parameters.{name}" for name in lacking]


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

"""LMI's dynamic-batch dialect: a prompt or a list of them, answered by a list of texts in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSONLINES, SLOT, template
from handler.core.values import NO_TOKEN, Delta, Finish, Request, Token
from handler.protocols.kernel.dialect import Description, Dialect, ParsedRequest, ServerContext
from handler.protocols.kernel.readers import read_adapters
from handler.protocols.kernel.reply import SequenceOutput, TokenStream, WholeReply
from handler.protocols.kernel.schema import TEXT, listing
from handler.protocols.kernel.texts import NON_EMPTY
from handler.protocols.lmi.api import BatchError, BatchErrors, BatchFailure, BatchLine, BatchText
from handler.protocols.lmi.request import (
    Lmi,
    lmi_request,
    read_field,
    read_object,
    read_parameters_field,
    unknown_names,
    wants_stream,
)

_LMI = Lmi()  # one request of a batch is LMI's
_IN_ATTRIBUTES = "in X-Amzn-SageMaker-Custom-Attributes"
_NOT_HERE = f"is only available with rolling batch; route=/generate {_IN_ATTRIBUTES} has TGI's details"


_WITH_PROMPTS_SINCE = (0, 29)
"""LMI 0.28's code had them too, but not its document of the schema, which is the one served here."""


class DynamicBatch(Dialect):
    """Each prompt of a list is a request of its own with the same parameters. The answer waits for all of them."""

    name = "dynamic_batch"
    errors = BatchErrors()
    stream_framing = JSONLINES
    description = Description(
        title="Dynamic batch",
        request="BatchRequest",
        request_shape=lmi_request({"anyOf": [TEXT, listing(NON_EMPTY, minItems=1)]}),
        error=BatchError,
        example={
            "inputs": ["The capital of France is", "The capital of Italy is"],
            "parameters": {"max_new_tokens": 8},
        },
        answer=list[BatchText],
        chunk=BatchLine,
        failure=BatchFailure,
        streams=(JSONLINES.content_type,),
    )

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        body = read_object(body)
        parameters = read_parameters_field(body)
        inputs = body.get("inputs")
        prompts = [inputs] if inputs is None or isinstance(inputs, str) else inputs
        if inputs is not None and not _are_prompts(prompts):
            raise InvalidPayload("'inputs' must be a non-empty string or a non-empty list of them")
        most = context.config.max_rolling_batch_size
        if len(prompts) > most:
            raise InvalidPayload(f"'inputs' holds {len(prompts)} prompts; the most is {most} (max_rolling_batch_size)")
        for name in ("details", "decoder_input_details"):
            if parameters.get(name) not in (None, False):
                raise InvalidParameter(f"parameters.{name}: {_NOT_HERE}")
        ignored = unknown_names(body, parameters, context)
        if read_field(parameters, "output_formatter") is not None:  # unknown ones are among the unknown names
            ignored.append("parameters.output_formatter")
        adapters = read_adapters(body, len(prompts), context)
        parsed = [
            _LMI.parse_prompt(prompt, parameters, context, adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        full = _has_prompts(parameters, context)
        requests = [item.request._replace(full_text=full) for item in parsed]
        ignored += [*parsed[0].beaten, *parsed[0].ignored]
        if wants_stream(body, parsed[0].streaming) and not context.config.enable_streaming:
            ignored += _asking_for_stream(body, parameters)
        if requests[0].sampling.prompt_logprobs:
            raise InvalidParameter(f"parameters.prompt_logprobs=1: {_NOT_HERE}")
        if requests[0].sampling.top_logprobs:
            raise InvalidParameter(f"parameters.logprobs and top_n_tokens: {_NOT_HERE}")
        if parsed[0].outputs is not None:
            raise InvalidParameter("parameters.outputs and return_...: are only available with rolling batch")
        if requests[0].sampling.num_sequences > 1:
            raise InvalidParameter("parameters.n, best_of and num_beams must be 1: an answer holds one text a prompt")
        if context.config.enable_streaming:
            return ParsedRequest(requests, BatchStream(requests), self.errors, ignored, streams=True)
        return ParsedRequest(requests, BatchDocument(requests), self.errors, ignored)


def _has_prompts(parameters: Mapping[str, Any], context: ServerContext) -> bool:
    """Return whether texts begin with their prompts: where the client says nothing, whole ones do since LMI 0.29."""
    said = read_field(parameters, "return_full_text")
    config = context.config
    return config.lmi_version >= _WITH_PROMPTS_SINCE and not config.enable_streaming if said is None else bool(said)


def _asking_for_stream(body: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """List the names that ask for a stream. LMI answers them whole: only option.enable_streaming streams."""
    inner = ["parameters.streaming"] if parameters.get("streaming") else []
    return ["stream", *inner] if body.get("stream") else inner


def _are_prompts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


class BatchDocument(WholeReply):
    """A text for each prompt."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(len(requests))
        self._requests = requests

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        return self._sequences[index]

    def _document(self) -> list[BatchText]:
        return [
            {"generated_text": (request.prompt if request.full_text else "") + sequence.text}
            for request, sequence in zip(self._requests, self._sequences, strict=True)
        ]


_line: BatchLine = {"outputs": [SLOT]}
_LINE = template(JSONLINES.encode(_line))


class BatchStream(TokenStream):
    """A line a step, with the next token of each prompt: "" of one that has ended.

    Prompts need not advance together, so that a token waits for those of its line.
    """

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(DynamicBatch.errors, JSONLINES, len(requests))
        self._befores = [request.prompt if request.full_text else "" for request in requests]
        self._waiting: list[deque[str]] = [deque() for _ in requests]
        self._ended = [False] * len(requests)

    def _token(self, place: int, token: Token) -> bytes:
        self._put(place, token)
        if len(self._events) == 1:
            self._events[0] = _LINE
        return self._lines()

    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        if token is not NO_TOKEN:
            self._put(place, token)
        self._ended[place] = True
        return self._lines()

    def _put(self, place: int, token: Token) -> None:
        before, self._befores[place] = self._befores[place], ""
        self._waiting[place].append(before + token.text)

    def _lines(self) -> bytes:
        """Take the lines for which every prompt has its token, or has ended."""
        lines = []
        while any(self._waiting) and all(map(any, zip(self._waiting, self._ended, strict=True))):
            line: BatchLine = {"outputs": [texts.popleft() if texts else "" for texts in self._waiting]}
            lines.append(JSONLINES.encode(line))
        return b"".join(lines)

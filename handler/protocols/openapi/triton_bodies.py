"""The bodies of Triton's generate extension: inputs from their table, flat or under `parameters`."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.base import ServerContext
from handler.protocols.openapi.base import Components, Dialect, always
from handler.protocols.openapi.shapes import COUNT, NUMBER, TEXT, Shape, listing, nullable, parameters, record
from handler.protocols.triton.inputs import TABLE

_NUMBERS = {"anyOf": [NUMBER, listing(nullable(NUMBER))]}
_TEXTS = {"anyOf": [TEXT, listing(TEXT)]}
_COUNTS = {"anyOf": [COUNT, listing(COUNT)]}


def _request(context: ServerContext) -> Shape:
    inputs = parameters(TABLE.parameters, context)
    text = {"text_input": {"anyOf": [TEXT, listing(TEXT, minItems=1, maxItems=1)]}}
    return record(
        {}, {**text, "id": TEXT, "parameters": {"type": "object", "properties": {**text, **inputs}}, **inputs}
    )


_RESPONSE = record(
    {"model_name": TEXT, "model_version": TEXT, "text_output": _TEXTS},
    {
        "id": TEXT,
        "cum_log_probs": _NUMBERS,
        "output_log_probs": _NUMBERS,
        "context_logits": _NUMBERS,
        "generation_logits": _NUMBERS,
        "finish_reason": _TEXTS,
        "cumulative_logprob": _NUMBERS,
        "num_input_tokens": _COUNTS,
        "num_output_tokens": _COUNTS,
    },
)
_ERROR = record({"error": TEXT})

COMPONENTS: Components = {
    "TritonRequest": _request,
    "TritonResponse": always({"anyOf": [_RESPONSE, _ERROR]}),
    "TritonError": always(_ERROR),
}

_ASKED = {"text_input": "The capital of France is", "max_tokens": 8, "exclude_input_in_output": True}
_ANSWERED = {"model_name": "model", "model_version": "1", "text_output": " Paris."}
_EVENTS = "text/event-stream"


def _triton(answer: str, *streams: str) -> Dialect:
    return Dialect("Triton", "TritonRequest", answer, "TritonError", _ASKED, _ANSWERED, "TritonResponse", streams)


DIALECTS: Mapping[str, Dialect] = {
    "triton_generate": _triton("TritonResponse"),
    "triton_generate_stream": _triton("", _EVENTS),
    "triton_shape": _triton("TritonResponse", _EVENTS),
}

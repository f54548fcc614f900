"""Requests of Triton's generate extension, as its TensorRT-LLM models take them.

Source: Triton's docs/protocol/extension_generate.md; its src/http_server.cc for the words of refusals.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.values import FieldNames, Request, Sampling
from handler.protocols.kernel.base import Dialect, ParsedRequest
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import ParsedParameters, read_all
from handler.protocols.kernel.readers.body import report_unknown
from handler.protocols.kernel.readers.values import MAX_NAME
from handler.protocols.kernel.validation import show
from handler.protocols.tensors.outputs import select_tensors
from handler.protocols.triton.answers import TritonHead
from handler.protocols.triton.errors import ERRORS, EVENTS, OneResponse, TritonErrors
from handler.protocols.triton.inputs import (
    INPUTS,
    LLMAPI,
    PROMPT,
    TABLE,
    defaults,
    from_text,
    join_guide,
    join_sampling,
)
from handler.protocols.triton.response import ResponseOptions, ResponseReply, StreamReply

VERSION = "1"
"""The version of the one model."""

Datatypes = Mapping[str, str]
"""Tensor's name -> Triton's datatype."""

_EXTRAS = ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")


class Route(Enum):
    """The route, which decides the number of responses; on a shared path (SHAPE) the body's `stream` does."""

    GENERATE = "generate"
    STREAM = "generate_stream"
    SHAPE = "shape"


class Triton(Dialect):
    """`/generate`, `/generate_stream`, and bodies with `text_input` on other routes."""

    errors = ERRORS
    any_media = True  # Triton looks at no content type
    unique_keys = True

    def __init__(self, route: Route) -> None:
        self.name = f"triton_{route.value}"
        self._route = route

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("attempt to get members for non-object")
        id = body.get("id", "")
        if not isinstance(id, str):
            raise InvalidPayload("Unable to parse 'id': attempt to access JSON non-string as string")
        if len(id) > MAX_NAME:  # each response repeats it
            raise InvalidPayload(f"Unable to parse 'id': it has {len(id)} characters; at most {MAX_NAME}")
        given, unknown = _read_names(body)
        prompt = _read_prompt(given, id, context)
        given, replaced = join_sampling(given)
        given = join_guide(given)
        parameters = read_all(given, context, defaults=defaults(given), table=TABLE)
        ignored = report_unknown([*unknown, *replaced], body, context)
        streams = self._streams(parameters)
        request = _request(prompt, parameters, ignores_end=given.get("ignore_eos") in (True, [True]))
        fixed: TritonHead = {"model_name": context.model_names[0], "model_version": VERSION}
        if id:
            fixed["id"] = id
        options = ResponseOptions(
            request,
            fixed,
            select_tensors((), _tensors(parameters), -1),
            frozenset(name for name in _EXTRAS if parameters.others.get(name)),
            "" if _without_prompt(given, parameters, streams) else prompt,
        )
        errors = TritonErrors(events=True)
        if streams:
            _check_single_sequence(request.sampling, parameters)
            return ParsedRequest((request,), StreamReply(options, errors), errors, ignored, streams=True)
        if self._route is Route.STREAM:
            return ParsedRequest((request,), ResponseReply(options, EVENTS), errors, ignored, streams=True)
        return ParsedRequest((request,), ResponseReply(options), self.errors, ignored)

    def _streams(self, parameters: ParsedParameters) -> bool:
        """Return whether there is a response a token.

        `/generate_stream` streams by default, unlike TensorRT-LLM's model, which waits for `stream`.
        """
        stream = parameters.others.get("stream")
        if self._route is Route.STREAM:
            return stream is not False
        if stream and self._route is Route.GENERATE:
            raise OneResponse
        return bool(stream)


# -- reading -----------------------------------------------------------------------------------------------------


def _read_names(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the inputs, flat or under `parameters`, and list the other names.

    Those must have the types that Triton allows in a request's parameters, whether or not a model reads them.
    """
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidPayload("Expected JSON object for keyword: 'parameters'")
    given: dict[str, Any] = {}
    unknown: list[str] = []
    for prefix, names in (("", body), ("parameters.", parameters)):
        for name, value in names.items():
            if not prefix and name in ("id", "parameters"):
                continue
            if value is None or isinstance(value, dict) or (isinstance(value, list) and not _is_input(name)):
                where = "Converting keyword: 'parameters': " if prefix else ""
                kinds = "It should be either 'int', 'bool', or 'string'."
                raise InvalidParameter(f"{where}parameter '{name[:64]}' has invalid type. {kinds}")
            if not _is_input(name):
                unknown.append(prefix + name)
            elif name in given:
                raise InvalidPayload(f"input '{name}' already exists in request")
            else:
                given[name] = from_text(name, value)
    return given, unknown


def _is_input(name: str) -> bool:
    return name == PROMPT or name in INPUTS


def _read_prompt(given: dict[str, Any], id: str, context: ServerContext) -> str:
    """Take the prompt out of the inputs."""
    if PROMPT not in given:
        expected = f"expected number of inputs between 1 and {len(INPUTS) + 1} but got {len(given)} inputs"
        raise InvalidPayload(
            f"[request id: {id or '<id_unknown>'}] {expected} for model '{context.model_names[0]}'. Got input(s) "
            f"{sorted(given)}, but missing required input(s) ['{PROMPT}']. Please provide all required input(s)."
        )
    prompt = given.pop(PROMPT)
    if isinstance(prompt, list):
        if len(prompt) != 1:
            raise InvalidPayload(f"The schema can not convert input '{PROMPT}' to tensor with proper shape")
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise InvalidPayload(f"Unable to parse '{PROMPT}': attempt to access JSON non-string as string")
    return prompt


def _request(prompt: str, parameters: ParsedParameters, *, ignores_end: bool) -> Request:
    sampling, names, end_id = parameters.sampling, parameters.names, parameters.others.get("end_id")
    if end_id is not None:  # in the place of the model's own end token
        if ignores_end:
            raise InvalidParameter(f"end_id={end_id}: contradicts ignore_eos=true")
        sampling = sampling._replace(stop_token_ids=(*sampling.stop_token_ids, end_id))
    ranked = sampling.num_sequences > 1 or bool(parameters.others.get("cumulative_logprob"))
    return Request(
        prompt=prompt,
        sampling=sampling._replace(logprobs=ranked or bool(parameters.others.get("return_log_probs"))),
        adapter=parameters.others.get("adapter"),
        eos_token_id=end_id,
        names=FieldNames(
            prompt=PROMPT,
            max_new_tokens=names.get("max_new_tokens", "max_tokens"),
            stop_token_ids="end_id",
            logits=names.get("return_generation_logits", "return_context_logits"),
            structured_output="guided_decoding_guide",
        ),
    )


def _tensors(parameters: ParsedParameters) -> Mapping[str, bool | None]:
    return {
        "return_log_probs": parameters.others.get("return_log_probs"),
        "return_context_logits": parameters.sampling.return_context_logits,
        "return_generation_logits": parameters.sampling.return_generation_logits,
    }


def _without_prompt(given: Mapping[str, Any], parameters: ParsedParameters, streams: bool) -> bool:
    """Return whether the text leaves the prompt out: in a stream and from the llmapi model, by default."""
    exclude = parameters.others.get("exclude_prompt")
    if exclude is not None:
        return bool(exclude)
    return streams or any(name.startswith(LLMAPI) for name in given)


def _check_single_sequence(sampling: Sampling, parameters: ParsedParameters) -> None:
    for field in ("n", "best_of", "num_beams"):
        if (count := getattr(sampling, field)) > 1:
            raise InvalidParameter(f"{parameters.names[field]}={show(count)}: must be 1 when streaming")


# -- the model's metadata ----------------------------------------------------------------------------------------


def inputs() -> Datatypes:
    """Return all inputs, the required one first."""
    return {PROMPT: "BYTES", **{name: input.datatype for name, input in INPUTS.items()}}


def outputs() -> Datatypes:
    """Return all outputs beside the text."""
    floats = ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits", "cumulative_logprob")
    counts = ("num_input_tokens", "num_output_tokens")
    return {
        "text_output": "BYTES",
        "finish_reason": "BYTES",
        **dict.fromkeys(floats, "FP32"),
        **dict.fromkeys(counts, "INT32"),
    }

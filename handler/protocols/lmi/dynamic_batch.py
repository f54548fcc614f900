"""LMI's requests with `inputs` in dynamic batch mode.

A body has one prompt or a list of prompts. The response is a list of texts in the same order.
Source: docs.djl.ai, "LMI handlers Inference API Schema". docs/wire/lmi.md documents the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSONLINES
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, ParsedRequest
from handler.protocols.kernel.readers import read_adapters
from handler.protocols.kernel.schema import TEXT, listing
from handler.protocols.kernel.texts import NON_EMPTY
from handler.protocols.lmi.api import BatchError, BatchFailure, BatchLine, BatchText, DynamicBatchErrors
from handler.protocols.lmi.request import (
    Lmi,
    lmi_request,
    read_field,
    read_object,
    read_parameters_field,
    unknown_names,
    wants_stream,
)
from handler.protocols.lmi.response import BatchDocument, BatchStream

_LMI = Lmi()  # parses each prompt
_IN_ATTRIBUTES = "in X-Amzn-SageMaker-Custom-Attributes"
_NOT_HERE = f"only available with rolling batch; for TGI's details, send route=/generate {_IN_ATTRIBUTES}"


_WITH_PROMPTS_SINCE = (0, 29)
"""The first release for which texts begin with their prompts by default.

LMI 0.28 also returned the prompts, but for 0.28 this server follows LMI's documentation, which shows none.
"""


class LmiDynamicBatch(Dialect):
    """LMI's dynamic-batch dialect. Each prompt of a list becomes a separate request with the same parameters.

    A non-streaming response is sent once all of these requests have ended.
    """

    name = "dynamic_batch"
    errors = DynamicBatchErrors()
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
        response=list[BatchText],
        chunk=BatchLine,
        failure=BatchFailure,
        streams=(JSONLINES.content_type,),
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        body = read_object(body)
        parameters = read_parameters_field(body)
        prompts = _read_prompts(body.get("inputs"), context.config.max_rolling_batch_size)
        for name in ("details", "decoder_input_details"):
            if parameters.get(name) not in (None, False):
                raise InvalidParameter(f"parameters.{name}: {_NOT_HERE}")
        ignored = unknown_names(body, parameters, context)
        if read_field(parameters, "output_formatter") is not None:  # an unknown formatter is already in the list
            ignored.append("parameters.output_formatter")
        adapters = read_adapters(body, len(prompts), context, request_context.adapter)
        parsed = [
            _LMI.parse_prompt(prompt, parameters, context, adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        full_text = _has_prompts(parameters, context)
        requests = [prompt.request._replace(full_text=full_text) for prompt in parsed]
        ignored += [*parsed[0].overridden, *parsed[0].ignored]
        if wants_stream(body, parsed[0].streaming) and not context.config.enable_streaming:
            ignored += ["stream"] if body.get("stream") else []  # as in LMI, only the option enables streams
            ignored += ["parameters.streaming"] if parameters.get("streaming") else []
        if requests[0].sampling.prompt_logprobs:
            raise InvalidParameter(f"parameters.prompt_logprobs=1: {_NOT_HERE}")
        if requests[0].sampling.top_logprobs:
            raise InvalidParameter(f"parameters.logprobs and parameters.top_n_tokens: {_NOT_HERE}")
        if parsed[0].outputs is not None:
            raise InvalidParameter("parameters.outputs and parameters.return_...: only available with rolling batch")
        if requests[0].sampling.num_sequences > 1:
            raise InvalidParameter("parameters.n, best_of and num_beams must be 1: each prompt gets a single response")
        if context.config.enable_streaming:
            return ParsedRequest(requests, BatchStream(requests, self.errors), self.errors, ignored, streams=True)
        return ParsedRequest(requests, BatchDocument(requests), self.errors, ignored)


def _has_prompts(parameters: Mapping[str, Any], context: ServerContext) -> bool:
    """Return whether each text begins with its prompt. This is the default since LMI 0.29, except in streams."""
    full_text, config = read_field(parameters, "return_full_text"), context.config
    if full_text is not None:
        return bool(full_text)
    return config.lmi_version >= _WITH_PROMPTS_SINCE and not config.enable_streaming


def _read_prompts(value: Any, maximum: int) -> list[str | None]:
    """Return the prompts, or [None] if the body has no `inputs`."""
    prompts = value if isinstance(value, list) else [value]
    if value is not None and not (prompts and all(isinstance(prompt, str) and prompt for prompt in prompts)):
        raise InvalidPayload("'inputs' must be a non-empty string or a non-empty list of such strings")
    if len(prompts) > maximum:
        raise InvalidPayload(
            f"'inputs' has {len(prompts)} prompts; the maximum is {maximum} (option.max_rolling_batch_size)"
        )
    return prompts

"""LMI's async mode (option.async_mode). `inputs` follows LMI's schema; `prompt` and `messages` follow vLLM's.

Source: djl_python.lmi_vllm of DJL Serving 0.33 and later. A body with `inputs` accepts the parameters of LMI
and of vLLM's completions (docs/wire/async.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.config.config import Config
from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import JSON_LINE, JSONLINES, Framing
from handler.core.values import LMI_NAMES, Adapter, Request, Token, keep_last
from handler.protocols.kernel.body import PYDANTIC, relaxed_by, report_unknown, unknown_parameters
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, Formats, ParsedRequest
from handler.protocols.kernel.parameters import (
    PARAMETERS,
    REQUEST_FIELDS,
    Parameter,
    ParsedParameters,
    Table,
    read_sampled,
    request_fields,
    request_shape,
)
from handler.protocols.kernel.parameters import parameters as shapes_of
from handler.protocols.kernel.readers import ADAPTERS, integer, read_adapters
from handler.protocols.kernel.reply import Reply, TokenEncoder
from handler.protocols.kernel.schema import FLAG, NULL, Shape, nullable, record, schema_of_reader
from handler.protocols.kernel.tensors import TensorValues
from handler.protocols.kernel.texts import TooManyTexts, read_texts, text_of, texts_shape
from handler.protocols.lmi.api import (
    AsyncAnswer,
    AsyncDetails,
    AsyncError,
    AsyncErrors,
    AsyncFailedLine,
    AsyncLine,
    AsyncPromptErrors,
    AsyncStreamDetails,
    AsyncToken,
)
from handler.protocols.lmi.chat import noting_foreign, without_foreign
from handler.protocols.lmi.request import (
    EXAMPLE,
    ignored,
    openai_reply,
    read_field,
    read_parameters_field,
    read_stream,
    without_overridden,
)
from handler.protocols.lmi.response import DocumentReply, StreamEnd, StreamReply, WholeOutput, line_encoder
from handler.protocols.openai.chat import CHAT_EXAMPLE, OpenAiChat, VllmChatFormat
from handler.protocols.openai.completions import COMPLETION_EXAMPLE, OpenAiCompletions
from handler.protocols.openai.request import (
    CHAT,
    COMPLETIONS,
    MODEL,
    REASONS,
    OpenAiDialect,
    read_model,
)


class AsyncFormat:
    """The response format of LMI's async mode: one sequence, without alternatives or output tensors."""

    special_in_text = True

    def chunk(self, token: Token, index: int, *, tops: bool = False, outputs: TensorValues | None = None) -> AsyncLine:
        return {"index": 0, "token": _token(token), "generated_text": None, "details": None}

    def token_encoder(self, framing: Framing, texts: list[str]) -> TokenEncoder:
        return line_encoder(self.chunk, framing, texts)

    def last_chunk(self, chunk: AsyncLine, text: str, end: StreamEnd | None) -> AsyncLine:
        details: AsyncStreamDetails | None = None
        if end is not None:
            details = {
                "finish_reason": REASONS[end.finish] or "stop",
                "seed": end.request.sampling.signed_seed,
                "generated_tokens": end.num_tokens,
                "input_length": end.num_prompt_tokens,
            }
        return {**chunk, "generated_text": text, "details": details}

    def document(self, text: str, output: WholeOutput | None, outputs: TensorValues | None = None) -> AsyncAnswer:
        if output is None:
            return {"generated_text": text}
        best = output.best
        details: AsyncDetails = {
            "finish_reason": REASONS[best.finish] or "stop",
            "generated_tokens": len(best.tokens),
            "seed": output.request.sampling.signed_seed,
            "prefill": [_token(token) for token in best.prefill if token.logprob is not None],
            "tokens": [_token(token) for token in best.tokens],
        }
        return {"generated_text": text, "details": details}


class AsyncStream(StreamReply):
    """A stream of lines that ends with two empty lines, which LMI sends in place of vLLM's token counts and [DONE]."""

    def _end(self) -> bytes:
        return b"\n\n"


def _token(token: Token) -> AsyncToken:
    return {"id": token.id, "text": token.text, "logprob": token.logprob}


MODEL_NAME = "lmi"
"""The name under which LMI serves a model without option.served_model_name."""

_MAX_NEW_TOKENS = 30

_ERRORS = AsyncErrors()
_EVENTS = JSONLINES._replace(end=b"\n")
"""The framing of vLLM's events as JSON lines. An empty line replaces [DONE]."""

_FORMS: Mapping[str, Any] = {"error": AsyncError, "failure": AsyncFailedLine, "streams": (JSONLINES.content_type,)}
"""The parts of a description that the dialects of async mode share."""

_UNSHOWN = ("n", "top_n_tokens", "logprobs")
"""Parameters that request additional choices or token alternatives, which vLLM computes but LMI's responses omit."""

_WINNERS = {
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "return_full_text": "echo",
    "ignore_eos_token": "ignore_eos",
    "stop_sequences": "stop",
    "decoder_input_details": "prompt_logprobs",
}
"""Maps LMI's parameter names to vLLM's names. If a body has both, vLLM's name overrides LMI's."""

_LMIS = {
    **{
        name: PARAMETERS[name]
        for name in (
            "do_sample", "temperature", "max_new_tokens", "stop_sequences", "ignore_eos_token",
            "decoder_input_details", "prompt_logprobs",
        )
    },
    "max_tokens": PARAMETERS["max_new_tokens"],
    "truncate": COMPLETIONS.parameters["truncate_prompt_tokens"],
    **dict.fromkeys(("n", "top_n_tokens"), Parameter("", integer(1))),
    "logprobs": Parameter("", integer(0)),
}  # fmt: skip

TABLE = Table(
    {
        **{name: parameter for name, parameter in without_foreign(COMPLETIONS).parameters.items() if name != "best_of"},
        **_LMIS,
    },
    "parameters.",
)

REQUEST_NAMES = {name: read for name, read in REQUEST_FIELDS.items() if name != "output_formatter"}
"""The fields of `parameters` that are not in `TABLE`."""

FIELDS: Mapping[str, Shape] = {
    "prompt": NULL,  # a body with a prompt is a completion
    "inputs": texts_shape(1),
    "parameters": {"type": ["object", "null"], "description": "null counts as absent"},
    "stream": nullable(FLAG),
    **MODEL,
    **ADAPTERS,
}
_PARAMETER_NAMES = TABLE.parameters.keys() | REQUEST_NAMES.keys()
_relax = relaxed_by(PYDANTIC, FIELDS)
_relax_parameters = relaxed_by(
    PYDANTIC, {**{name: schema_of_reader(read) for name, read in REQUEST_NAMES.items()}, **TABLE.shapes}
)


def read_served(
    body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
) -> tuple[str, Adapter | None]:
    """Return the model name for the response, and the LoRA adapter that `adapters`, a header or `model` selects."""
    (adapter,) = read_adapters(body, 1, context, request_context.adapter)
    return read_model(body, context, request_context, served_name(context.config), adapter)


def served_name(config: Config) -> str:
    """Return the name of the base model in LMI's responses."""
    return next((name for name in config.served_model_name or () if name != "*"), MODEL_NAME)


def _body(context: ServerContext) -> Shape:
    properties = {**shapes_of(TABLE.parameters, context), **request_fields(REQUEST_NAMES)}
    return record(
        {"inputs": FIELDS["inputs"]}, {**FIELDS, "parameters": {**FIELDS["parameters"], "properties": properties}}
    )


class AsyncPrompt(Dialect):
    """The dialect of `inputs` in async mode. Sampling is enabled unless `do_sample` is false or `temperature` is 0."""

    name = "lmi_async"
    errors = AsyncPromptErrors()
    format = AsyncFormat()
    description = Description(
        title="LMI async",
        request="LmiAsyncRequest",
        request_shape=_body,
        example=EXAMPLE,
        response=AsyncAnswer,
        chunk=AsyncLine,
        **_FORMS,
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict) or body.get("inputs") is None:
            raise InvalidPayload("the body must be a JSON object with 'inputs', 'prompt' or 'messages'")
        body = _relax(body)
        params, overridden = without_overridden(_relax_parameters(read_parameters_field(body)), _WINNERS)
        model, adapter = read_served(body, context, request_context)
        streams = read_stream(body)
        if streams is None:
            streams = bool(read_field(params, "stream"))
        parameters = read_sampled(
            params, context, generation=context.generation, max_new_tokens=_MAX_NEW_TOKENS, table=TABLE
        )
        request = _request(body["inputs"], params, parameters, context, adapter)
        if streams and request.sampling.prompt_logprobs:
            raise InvalidParameter(
                "parameters.decoder_input_details and parameters.prompt_logprobs: not available when streaming"
            )

        reply: Reply
        if streams:
            reply = AsyncStream(self.format, request, JSONLINES, self.errors)
        else:
            reply = DocumentReply(self.format, request, framing=JSON_LINE)
        names = [*_ignored(body, params, context), *overridden, *ignored(parameters)]
        formats = Formats(of_tokens=True, as_openai=openai_reply(request, context, streams=streams, model=model))
        return ParsedRequest((request,), reply, self.errors, names, streams, formats)


def _request(
    inputs: Any,
    params: Mapping[str, Any],
    parameters: ParsedParameters,
    context: ServerContext,
    adapter: Adapter | None,
) -> Request:
    try:
        (prompt,) = read_texts(inputs, "inputs", 1, "prompts")
    except TooManyTexts as error:
        raise InvalidPayload(f"{error.message}; to send several prompts, use 'prompt' instead of 'inputs'") from None
    flags = {name: read_field(params, name) for name in ("details", "return_full_text")}
    sampling, names, others = parameters
    return Request(
        text_of(prompt, "inputs", context),
        sampling._replace(prompt_logprobs=sampling.prompt_logprobs and bool(flags["details"])),
        truncation=keep_last(others.get("truncate")),
        details=bool(flags["details"]),
        full_text=bool(flags["return_full_text"] or others.get("echo")),
        prompt_ids=None if isinstance(prompt, str) else prompt,
        adapter=adapter,
        priority=others.get("priority", 0),
        min_free_tokens=None if "max_new_tokens" in names else 1,
        names=LMI_NAMES._replace(
            max_new_tokens=names.get("max_new_tokens", LMI_NAMES.max_new_tokens),
            bad_token_ids="parameters.bad_words",
            structured_output=names.get("structured_output", "parameters.response_format"),
        ),
    )


def _ignored(body: Mapping[str, Any], params: Mapping[str, Any], context: ServerContext) -> list[str]:
    """List the fields that have no effect: unknown fields, and fields that request values that LMI's responses omit."""
    unshown = [name for name in _UNSHOWN if params.get(name) not in (None, 0, 1)]
    if params.get("decoder_input_details") and not params.get("details"):
        unshown.append("decoder_input_details")
    if params.get("return_token_ids"):
        unshown.append("return_token_ids")
    unknown = report_unknown(body, FIELDS, context, unknown_parameters(params, _PARAMETER_NAMES))
    return [*unknown, *(f"parameters.{name}" for name in unshown)]


class _AsyncOpenAi(OpenAiDialect):
    """Base class of OpenAI's dialects in async mode. Streams are JSON lines, and `adapters` may name an adapter."""

    errors = _ERRORS
    whole: Framing = JSON_LINE
    stream: Framing = _EVENTS

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        """Parse a body. The reply is in OpenAI's format, so a user's output formatter can process the response."""
        parsed = super().parse(body, context, request_context)
        return noting_foreign(parsed._replace(formats=Formats(as_openai=lambda: parsed.reply)), context)

    def read_model(
        self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
    ) -> tuple[str, Adapter | None]:
        return read_served(body, context, request_context)


class AsyncChat(_AsyncOpenAi, OpenAiChat):
    """vLLM's chat completions in LMI's async mode. Streams are JSON lines without [DONE]."""

    name = "lmi_async_chat"
    format = VllmChatFormat
    table = without_foreign(CHAT)
    fields: Mapping[str, Shape] = {**OpenAiChat.fields, **ADAPTERS, "inputs": NULL}  # `inputs` makes it a prompt
    refusal = False
    description = OpenAiChat.description._replace(
        title="LMI async chat",
        request="LmiAsyncChatRequest",
        request_shape=request_shape(fields, table, "messages"),
        example={"model": "lmi", **CHAT_EXAMPLE},
        **_FORMS,
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        parsed = super().parse(body, context, request_context)
        if body.get("inputs") is None:
            return parsed
        return parsed._replace(ignored=[*parsed.ignored, "inputs"])  # TensorRT-LLM's handler reads it as a chat


class AsyncCompletions(_AsyncOpenAi, OpenAiCompletions):
    """vLLM's completions in LMI's async mode."""

    name = "lmi_async_completions"
    table = without_foreign(COMPLETIONS)
    fields: Mapping[str, Shape] = {**OpenAiCompletions.fields, **ADAPTERS}
    description = OpenAiCompletions.description._replace(
        title="LMI async completions",
        request="LmiAsyncCompletionRequest",
        request_shape=request_shape(fields, table, "prompt"),
        example={"model": "lmi", **COMPLETION_EXAMPLE},
        **_FORMS,
    )

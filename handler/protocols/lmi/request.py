"""LMI's requests with `inputs` in rolling batch mode, and readers that are shared with LMI's other modes.

Source: docs.djl.ai, "LMI handlers Inference API Schema". docs/wire/lmi.md documents the fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import FRAMINGS, JSON, JSONLINES, SSE, Framing
from handler.core.values import (
    LMI_NAMES,
    SAMPLED,
    Adapter,
    FieldNames,
    Request,
    Sampling,
    keep_last,
)
from handler.protocols.kernel.body import PYTHON, as_int, relaxed_by, report_unknown, unknown_parameters
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, RequestShape, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, Formats, ParsedRequest
from handler.protocols.kernel.parameters import (
    LMI,
    LMI_NEUTRAL,
    LMI_NEUTRAL_IF_GREEDY,
    PARAMETERS,
    REQUEST_FIELDS,
    SEVERAL,
    Parameter,
    ParsedParameters,
    Table,
    are_plain,
    parameters,
    read_all,
    remember,
    request_fields,
)
from handler.protocols.kernel.readers import ADAPTERS, NamedValue, merge_adapters, read_adapters, show
from handler.protocols.kernel.reply import Reply
from handler.protocols.kernel.schema import FLAG, TEXT, Shape, nullable, record, schema_of_reader
from handler.protocols.kernel.tensors import TENSORS, OutputTensors, read_outputs, select_tensors
from handler.protocols.lmi.api import (
    LmiAnswer,
    LmiError,
    LmiErrors,
    LmiFailedLine,
    LmiLine,
)
from handler.protocols.lmi.response import (
    DocumentReply,
    LmiFormat,
    ResponseFormat,
    StreamReply,
)
from handler.protocols.openai.completions import completion_of
from handler.protocols.openai.request import OpenAiHead, identity

TABLE = Table({**PARAMETERS, **TENSORS, "outputs": Parameter(SEVERAL, read_outputs)}, "parameters.")
"""All fields of `parameters` that `read_all` reads."""

FIELDS: Mapping[str, Shape] = {
    "inputs": nullable({**TEXT, "minLength": 1}),
    "parameters": {"type": ["object", "null"], "description": "null counts as absent"},
    "stream": nullable(FLAG),
    **ADAPTERS,
}
"""The top-level fields of the body. In dynamic batch mode, `inputs` may also be a list."""
_PARAMETER_NAMES = TABLE.parameters.keys() | REQUEST_FIELDS.keys()
_FORMATTER = "output_formatter"
_relax = relaxed_by(PYTHON, FIELDS)
_relax_parameters = relaxed_by(
    PYTHON,
    {**{name: schema_of_reader(read) for name, read in REQUEST_FIELDS.items()}, **LMI.shapes},
    {"seed": as_int},
)


def read_object(body: Any) -> Mapping[str, Any]:
    """Return a rolling-batch or dynamic-batch body, with numbers and flags converted to their types as in LMI."""
    if not isinstance(body, dict):
        raise InvalidPayload("the body must be a JSON object with 'inputs'")
    parameters = body.get("parameters")
    has_ids = isinstance(parameters, dict) and parameters.get("input_ids") is not None
    if body.get("inputs") is None and not has_ids:
        raise InvalidPayload("the body has no 'inputs'")
    return {**_relax(body), "parameters": _relax_parameters(parameters)} if parameters else _relax(body)


def read_parameters_field(body: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = body.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidPayload("'parameters' must be an object")
    return parameters


def without_overridden(
    parameters: Mapping[str, Any], winners: Mapping[str, str]
) -> tuple[Mapping[str, Any], list[str]]:
    """Remove the parameters that are overridden by other parameters of the request.

    Args:
        winners: maps a parameter name to the name that overrides it in LMI.

    Returns:
        The other parameters, and the removed names whose values differ from the overriding values.
    """
    get = parameters.get
    lost = [name for name, by in winners.items() if get(name) is not None and get(by) is not None]
    if not lost:
        return parameters, []
    effective = {name: value for name, value in parameters.items() if name not in lost}
    return effective, [f"parameters.{name}" for name in lost if parameters[name] != parameters[winners[name]]]


def read_field(parameters: Mapping[str, Any], name: str) -> Any:
    """Read a field of `parameters` that is not a sampling parameter. Return None if it is absent."""
    value = parameters.get(name)
    return None if value is None else NamedValue(f"parameters.{name}", value).read(REQUEST_FIELDS[name])


def read_stream(body: Mapping[str, Any]) -> bool | None:
    """Read the top-level `stream` of the body. Return None if it is absent."""
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidPayload("'stream' must be true or false")
    return stream


def wants_stream(body: Mapping[str, Any], streaming: bool | None) -> bool:
    """Return whether a rolling-batch or dynamic-batch body requests a stream.

    Raises:
        InvalidParameter: GptManager's `streaming` parameter contradicts `stream`.
    """
    stream = read_stream(body)
    if streaming is not None and stream is not None and streaming != stream:
        raise InvalidParameter(f"parameters.streaming={show(streaming)} contradicts 'stream'")
    return bool(streaming if stream is None else stream)


def unknown_names(body: Mapping[str, Any], parameters: Mapping[str, Any], context: ServerContext) -> list[str]:
    """List the unknown fields of the body, and the fields that have no effect."""
    names = unknown_parameters(parameters, _PARAMETER_NAMES)
    if parameters.get(_FORMATTER) is not None and read_field(parameters, _FORMATTER) is None:
        names.append(f"parameters.{_FORMATTER}")
    if read_field(parameters, "stream") and not body.get("stream"):  # only the top-level `stream` is read
        names.append("parameters.stream")
    return report_unknown(body, FIELDS, context, names)


# -- when LMI samples, and which parameters greedy decoding ignores ----------------------------------------------------


_INFERRED_SINCE = (0, 32)

_NOTICE = (
    "requests with sampling parameters but without do_sample are decoded greedily, as in LMI before 0.32; "
    "set option.lmi_version=0.32 or later to sample when a temperature is set. The header x-lmi-ignored-parameters "
    "lists the ignored parameters"
)


def inferred(parameters: Mapping[str, Any], context: ServerContext) -> Mapping[str, Any]:
    """Return the default of `do_sample` in rolling batch mode, or {} if LMI infers none.

    Since LMI 0.32, a temperature other than 0 implies sampling. With TensorRT-LLM or beam search, LMI infers nothing.
    """
    if context.config.lmi_version < _INFERRED_SINCE or context.engine == "trtllm":
        return {}
    if parameters.get("num_beams") not in (None, 1):
        return {}
    return {"do_sample": parameters.get("temperature") not in (None, 0)}


def ignored(parsed: ParsedParameters) -> list[str]:
    """List the client's names of the sampling parameters that have no effect because decoding is greedy."""
    if parsed.sampling.do_sample:
        return []
    neutral = LMI_NEUTRAL_IF_GREEDY if "do_sample" in parsed.names else LMI_NEUTRAL
    names = {field: name for field, name in parsed.names.items() if field in SAMPLED}
    return [name for field, name in names.items() if getattr(parsed.sampling, field) not in neutral[field]]


_NO_LISTS_SINCE = (0, 30)
"""Before this release, LMI reads a list of one prompt as the prompt, and mixes up the responses to longer lists."""


_WINNERS = {"stop": "stop_sequences", "logprobs": "top_n_tokens"}
_WINNERS_OF_TRTLLM = {"stop_sequences": "stop"}
"""Maps a parameter name to the synonym that overrides it in LMI (djl_python/rolling_batch)."""


class ParsedPrompt(NamedTuple):
    """A parsed prompt with its parameters.

    Attributes:
        streaming: GptManager's `streaming` parameter, or None if it is absent.
        ignored: the sampling parameters that have no effect because decoding is greedy.
        overridden: the parameters that are overridden by another parameter.
    """

    request: Request
    outputs: OutputTensors | None
    streaming: bool | None
    ignored: list[str]
    overridden: list[str]


class _Fields(NamedTuple):
    """What a body contains. Most clients send the same values again with another prompt.

    Attributes:
        is_chosen: whether the client has chosen the framing.
    """

    request: Request
    outputs: OutputTensors | None
    framing: Framing
    errors: LmiErrors
    names: Sequence[str]
    streams: bool
    is_chosen: bool


def _plain_values(dialect: Lmi, body: Any, request_context: RequestContext) -> tuple[Any, ...] | None:
    """Return all that determines how a body is read except its prompt, or None if this is more than plain values."""
    if type(body) is not dict or request_context.adapter is not None or not body.keys() <= _PLAIN_FIELDS:
        return None
    inputs, parameters = body.get("inputs"), body.get("parameters")
    if type(inputs) is not str or not inputs or type(parameters) is not dict:
        return None
    if not parameters.keys() <= _PARAMETER_NAMES:
        return None
    values = (body.get("stream"), *parameters.values())
    kinds = tuple(map(type, values))
    key = dialect, request_context.may_be_formatted, tuple(parameters), values, kinds
    return key if are_plain(kinds) else None


_PLAIN_FIELDS = frozenset({"inputs", "parameters", "stream"})


def lmi_request(inputs: Shape) -> RequestShape:
    """Return a function that builds the schema of a body. `inputs` is the schema of the prompt."""

    def shape(context: ServerContext) -> Shape:
        properties = {**parameters(TABLE.parameters, context), **request_fields()}
        prompt_shape = {**nullable(inputs), "description": "May be omitted if the body has parameters.input_ids"}
        return record(
            {}, {**FIELDS, "inputs": prompt_shape, "parameters": {**FIELDS["parameters"], "properties": properties}}
        )

    return shape


EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8, "details": True}}
"""The example body in the OpenAPI document for all dialects with `inputs`."""


class Lmi(Dialect):
    """LMI's rolling-batch dialect. The response is a single object, or a stream with one line per token.

    Subclasses change the format of the response (`tgi/response.py`), not the flow.
    """

    name = "lmi"
    errors = LmiErrors()
    format: ResponseFormat = LmiFormat()
    stream_framing = JSONLINES
    defaults: Mapping[str, Any] = {}  # fields of Sampling
    details_default = False
    reports_seed = False  # whether details contain the seed
    description = Description(
        title="LMI",
        request="LmiRequest",
        request_shape=lmi_request(FIELDS["inputs"]),
        error=LmiError,
        example=EXAMPLE,
        response=LmiAnswer,
        chunk=LmiLine,
        failure=LmiFailedLine,
        streams=(JSONLINES.content_type, SSE.content_type),
        refuses_in_frame=True,
    )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        key = _plain_values(self, body, request_context)
        fields: _Fields | None = None if key is None else context.parsed.get(key)
        if fields is not None:
            return self._reply_to(
                Request._make((body["inputs"], *fields.request[1:])), fields, context, request_context
            )
        fields = self._read(read_object(body), context, request_context)
        call = self._reply_to(fields.request, fields, context, request_context)
        if key is not None and not (self.reports_seed and fields.request.details):  # each of these has its own seed
            logprobs = request_context.may_be_formatted or call.reply.shows_logprobs
            sampling = fields.request.sampling._replace(logprobs=logprobs)
            remember(key, fields._replace(request=fields.request._replace(prompt="", sampling=sampling)), context)
        return call

    def _read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> _Fields:
        parameters = read_parameters_field(body)
        prompt = _read_prompt(body.get("inputs"), context)
        (adapter,) = read_adapters(body, 1, context, request_context.adapter)
        parsed = self.parse_prompt(prompt, parameters, context, adapter, defaults=inferred(parameters, context))
        request = parsed.request
        framing = self._framing(parameters, context, wants_stream(body, parsed.streaming))
        if parsed.ignored and parameters.get("do_sample") is None and context.config.lmi_version < _INFERRED_SINCE:
            context.notices.once(_NOTICE)
        names = [*unknown_names(body, parameters, context), *parsed.overridden, *parsed.ignored]
        streams, errors = framing is not JSON, self.errors.framed(framing)
        if streams and request.sampling.num_sequences > 1:
            raise InvalidParameter(
                "parameters.n, best_of and num_beams must be 1 when streaming: only a non-streaming response "
                "can contain several sequences; to stream n choices, send 'prompt' instead of 'inputs'"
            )
        chosen = parameters.get(_FORMATTER) is not None
        return _Fields(request, parsed.outputs, framing, errors, names, streams, chosen)

    def _reply_to(
        self, request: Request, fields: _Fields, context: ServerContext, request_context: RequestContext
    ) -> ParsedRequest:
        _, outputs, framing, errors, names, streams, is_chosen = fields
        reply: Reply
        if streams:
            reply = StreamReply(self.format, request, framing, errors, outputs)
        else:
            reply = DocumentReply(self.format, request, outputs)
        if is_chosen or not request_context.may_be_formatted:
            return ParsedRequest((request,), reply, errors, names, streams)
        formats = Formats(of_tokens=True, as_openai=openai_reply(request, context, streams=streams))
        return ParsedRequest((request,), reply, errors, names, streams, formats)

    def _framing(self, parameters: Mapping[str, Any], context: ServerContext, stream: bool | None) -> Framing:
        framing: Framing | None = read_field(parameters, _FORMATTER)
        if parameters.get(_FORMATTER) is None:
            framing = FRAMINGS.get(context.config.output_formatter or "")
        return framing or (self.stream_framing if stream else JSON)

    def errors_of(self, body: Any, context: ServerContext) -> LmiErrors:
        """Return the error format for a body. Only the fields that determine the framing are read."""
        fields = body if isinstance(body, dict) else {}
        content = fields.get("parameters")
        if not isinstance(content, dict):
            content = {}
        parameters = _relax_parameters({name: content[name] for name in ("streaming", _FORMATTER) if name in content})
        framing = streams = None
        with contextlib.suppress(InvalidPayload, InvalidParameter):
            streaming = NamedValue("streaming", parameters.get("streaming"))
            streams = wants_stream(
                _relax({"stream": fields.get("stream")}), streaming.optional(TABLE.parameters["streaming"].read)
            )
        with contextlib.suppress(InvalidParameter):
            framing = self._framing(parameters, context, streams)
        return self.errors.framed(framing or self._framing({}, context, streams))

    def parse_prompt(
        self,
        prompt: str | None,
        parameters: Mapping[str, Any],
        context: ServerContext,
        adapter: Adapter | None = None,
        *,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> ParsedPrompt:
        """Read a prompt with its `parameters`.

        Args:
            prompt: the prompt, or None if the parameter `input_ids` replaces it.
            adapter: the adapter that the body names outside of `parameters`.
            defaults: the fields of Sampling whose defaults differ in this mode.

        Raises:
            InvalidParameter, InvalidPayload: the prompt or a parameter is invalid. The message names it.
        """
        parameters, overridden = without_overridden(
            parameters, _WINNERS_OF_TRTLLM if context.engine == "trtllm" else _WINNERS
        )
        flags = {name: read_field(parameters, name) for name in ("details", "return_full_text", "truncate")}
        defaults = {**(context.sampling_defaults if parameters.get("do_sample") else {}), **self.defaults, **defaults}
        parsed = read_all(parameters, context, defaults=defaults, table=TABLE)
        others = parsed.others
        sampling, end_id = _use_end_id(parsed.sampling, others.get("end_id"), parameters)
        details = self.details_default if flags["details"] is None else flags["details"]
        # Several sequences, alternatives and prompt tokens are only shown in the details, so they imply details.
        details = details or sampling.num_sequences > 1 or sampling.prompt_logprobs or sampling.top_logprobs > 0
        request = Request(
            prompt=_prompt(prompt, others.get("prompt_ids"), context),
            sampling=context.with_seed(sampling) if details and self.reports_seed else sampling,
            truncation=keep_last(flags["truncate"]),
            details=details,
            full_text=bool(flags["return_full_text"]),
            prompt_ids=others.get("prompt_ids"),
            adapter=merge_adapters(adapter, others.get("adapter"), parsed.names.get("adapter", "")),
            priority=others.get("priority", 0),
            eos_token_id=end_id,
            names=_names(parsed),
        )
        return ParsedPrompt(request, _select_tensors(parsed), others.get("stream"), ignored(parsed), overridden)


def openai_reply(request: Request, context: ServerContext, *, streams: bool, model: str = "") -> Callable[[], Reply]:
    """Return a function that creates the reply in OpenAI's format.

    Args:
        model: the model name in the response, or "" for the name of the adapter or of the server's model.
    """
    name = model or (context.model_names[0] if request.adapter is None else request.adapter.name)
    return lambda: completion_of(request, OpenAiHead(*identity("cmpl"), name, context.fingerprint), streams=streams)


def _read_prompt(value: Any, context: ServerContext) -> str | None:
    """Return the prompt, or None if the body has none."""
    if isinstance(value, list):
        if context.config.lmi_version < _NO_LISTS_SINCE and len(value) == 1 and isinstance(value[0], str):
            return _read_prompt(value[0], context)
        raise InvalidPayload(
            "'inputs' must be one string under rolling batch; send one request per prompt, "
            "or use dynamic batching (option.rolling_batch=disable)"
        )
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidPayload("'inputs' must be a non-empty string")
    return value


def _prompt(prompt: str | None, ids: Sequence[int] | None, context: ServerContext) -> str:
    """Return the text of the prompt. Token ids are decoded, including special tokens."""
    if ids is None:
        assert prompt is not None, "read_object() refuses a body without 'inputs' and input_ids"
        return prompt
    if prompt is not None:
        raise InvalidParameter(f"parameters.input_ids={show(ids)}: contradicts 'inputs'; send only one of them")
    assert context.vocabulary is not None, "token ids are refused without a vocabulary"
    return context.vocabulary.decode(ids)


def _use_end_id(sampling: Sampling, end_id: int | None, parameters: Mapping[str, Any]) -> tuple[Sampling, int | None]:
    """Add `end_id` to the stop tokens, unless it is an end token of the model.

    Returns:
        The sampling parameters, and the token id to report as EOS. The id is None if the client lists it as a stop
        token, or sends no `end_id`.
    """
    if end_id is None or end_id in sampling.stop_token_ids or not sampling.ignore_eos:
        return sampling, None
    if parameters.get("ignore_eos_token"):
        raise InvalidParameter(f"parameters.end_id={end_id}: contradicts parameters.ignore_eos_token=true")
    return sampling._replace(stop_token_ids=(*sampling.stop_token_ids, end_id)), end_id


def _select_tensors(parameters: ParsedParameters) -> OutputTensors | None:
    others = parameters.others
    tensor_names, forbids = others.get("outputs", ()), others.get("return_log_probs") is False
    if forbids and not {"output_log_probs", "cum_log_probs"}.isdisjoint(tensor_names):
        raise InvalidParameter(
            f"parameters.outputs={show(tensor_names)}: contradicts parameters.return_log_probs=false"
        )
    return select_tensors(parameters, tensor_names, others.get("pad_id", others.get("end_id", -1)))


def _names(parameters: ParsedParameters) -> FieldNames:
    """Return the client's names for fields, for use in the errors of later checks."""
    names = parameters.names
    if names.items() <= _DEFAULT_NAMES:
        return LMI_NAMES
    return LMI_NAMES._replace(
        **{field: names[parameter] for parameter, field in _FIELDS_BY_PARAMETER.items() if parameter in names}
    )


_FIELDS_BY_PARAMETER = {
    "prompt_ids": "prompt",
    "end_id": "stop_token_ids",
    "return_context_logits": "logits",
    "return_generation_logits": "logits",
    **{field: field for field in FieldNames._fields},
}
"""Maps a parameter to its field in `FieldNames`. Of several parameters for a field, the last one counts."""

_DEFAULT_NAMES = LMI_NAMES._asdict().items()

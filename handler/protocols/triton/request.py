"""Requests of Triton's generate extension, with the inputs of its TensorRT-LLM models.

Sources: Triton's docs/protocol/extension_generate.md, and its src/http_server.cc for error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import SSE, loads
from handler.core.values import Adapter, FieldNames, Request, Sampling, StructuredOutput
from handler.protocols.kernel.body import report_unknown
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, ParsedRequest
from handler.protocols.kernel.parameters import (
    PARAMETERS,
    ROWS,
    Parameter,
    ParsedParameters,
    Table,
    parameters,
    read_all,
    unsupported,
)
from handler.protocols.kernel.readers import (
    INT32,
    MAX_NAME,
    boolean,
    grammar,
    integer,
    json_schema,
    named_adapter,
    number,
    regex,
    show,
    string,
    strings,
)
from handler.protocols.kernel.schema import TEXT, Shape, accepts, listing, record, schema_of_reader
from handler.protocols.kernel.tensors import TENSORS, one_of, plain_or_tensor, select_tensors, single
from handler.protocols.openai.request import structured_outputs
from handler.protocols.triton.api import (
    ERRORS,
    EVENTS,
    VERSION,
    OneResponse,
    TritonError,
    TritonErrors,
    TritonHead,
    TritonResponse,
)
from handler.protocols.triton.response import ResponseOptions, TritonDocument, TritonStream

# The inputs are those of TensorRT-LLM's models `ensemble`, `tensorrt_llm_bls` and `llmapi` (`sampling_param_...`,
# `streaming`), and those of vLLM's backend (triton-inference-server/vllm_backend, src/utils) with its sampling
# parameters.


class InputTensor(NamedTuple):
    """An input of the model, with its Triton datatype and the dimensions after the batch dimension."""

    datatype: str
    parameter: Parameter
    dims: tuple[int, ...] = (1,)


# -- values ------------------------------------------------------------------------------------------------------


@accepts(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}])
def _words(value: Any) -> tuple[str, ...]:
    """Read a string or a list of strings. Empty strings are ignored, because TensorRT-LLM's examples send them."""
    items = [value] if isinstance(value, str) else value
    return strings([item for item in items if item != ""] if isinstance(items, list) else items)


@accepts(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"const": False}])
def _stop(value: Any) -> tuple[str, ...] | None:
    """Read vLLM's stop strings. Refuse TensorRT-LLM's `stop` flag, which cancels an earlier request."""
    if isinstance(value, bool):
        if value:
            raise ValueError("is not supported; to cancel a request, close its connection")
        return None
    return _words(value)


@accepts(anyOf=one_of({"type": "number", "minimum": 0, "maximum": 1}))
def _top_p(value: Any) -> float:
    return single(number(0, 1))(value) or 1.0  # 0 disables it in TensorRT-LLM


@accepts(anyOf=one_of({"type": "string"}))
def _adapter_name(value: Any, context: ServerContext) -> Adapter | None:
    return named_adapter(single(string)(value), context)


@accepts(type=["string", "object"])
def _structured_outputs(value: Any) -> StructuredOutput | None:
    """Read vLLM's `structured_outputs`, which vLLM's Triton backend accepts as a JSON string."""
    try:
        value = loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be a JSON object in a string") from None
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if name != "backend"}  # vLLM's backend ignores it
    return structured_outputs(value)


def _any_json(value: Any) -> StructuredOutput:
    if value != "":
        raise ValueError("must be omitted with guided_decoding_guide_type=json, which allows any JSON object")
    return StructuredOutput("json_object", "")


_GUIDE_READERS: Mapping[str, Callable[[Any], StructuredOutput]] = {
    "json": _any_json,
    "json_schema": json_schema,
    "regex": regex,
    "ebnf_grammar": grammar,
}
"""Maps guided_decoding_guide_type to the reader of guided_decoding_guide."""


@accepts(anyOf=[{"type": ["string", "object"]}, {"type": "array", "minItems": 1, "maxItems": 1}])
def _guide(value: Mapping[str, Any]) -> StructuredOutput:
    """Read `{type: guide}`, which `join_guide` builds from the two inputs."""
    ((kind, content),) = value.items()
    return _GUIDE_READERS[kind](content)


def _never(datatype: str, reason: str) -> InputTensor:
    """Return an input that is refused unless it is empty, 0 or false."""
    return InputTensor(datatype, unsupported(reason, "", [], [""], 0, [0], False, [False]))


_DATATYPES = {"integer": "INT32", "number": "FP32", "boolean": "BOOL"}


def _same(name: str) -> InputTensor:
    """Return the input that is read as LMI's parameter or tensor `name`. Its schema determines the datatype."""
    if name == "stop_token_ids":  # the only list
        return InputTensor("INT32", PARAMETERS[name], (-1,))
    parameter = TENSORS[name] if name in TENSORS else plain_or_tensor(name)
    plain = schema_of_reader(parameter.read)["anyOf"][0]
    is_long = plain.get("maximum", 0) > INT32
    return InputTensor("UINT64" if is_long else _DATATYPES[plain["type"]], parameter)


# -- the table ---------------------------------------------------------------------------------------------------

_FLAG = single(boolean)
_EMBEDDINGS = "the engines do not accept prompt embeddings"
_MEDIA = "prompts must be text"
_BIAS = "only tokens can be biased; send logit_bias to /invocations"
_METRICS = "the engines do not report these metrics per request; see /metrics"

PROMPT = "text_input"
IDS = "input_ids"
"""The name of the prompt input in the model `tensorrt_llm`."""
PROMPT_2023 = "INPUT_0"
"""The name of the prompt input in the `ensemble` model of 2023."""

EXTRAS = ("finish_reason", "cumulative_logprob", "num_input_tokens", "num_output_tokens")
"""Outputs that are neither text nor outputs of GptManager. The input `return_NAME` requests the output NAME."""

_ROWS: Mapping[str, InputTensor] = {
    "max_tokens": _same("max_new_tokens"),
    "stream": _same("streaming"),
    "exclude_input_in_output": InputTensor("BOOL", Parameter("exclude_prompt", _FLAG)),
    "stop_words": InputTensor("BYTES", Parameter("stop", _words), (-1,)),
    "bad_words": InputTensor("BYTES", Parameter("bad_sequences", _words), (-1,)),
    "end_id": _same("end_id"),
    "pad_id": _same("pad_id"),
    "temperature": _same("temperature"),
    "top_k": _same("top_k"),
    "top_p": InputTensor("FP32", Parameter("top_p", _top_p)),
    **{
        name: _same(name)
        for name in (
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "no_repeat_ngram_size",
            "min_length",
            "random_seed",
        )
    },
    "ignore_eos": _same("ignore_eos_token"),
    "stop": InputTensor("BYTES", Parameter("stop", _stop), (-1,)),
    "beam_width": _same("beam_width"),
    "length_penalty": _same("length_penalty"),
    "early_stopping": InputTensor("INT32", TENSORS["early_stopping"]),
    "num_return_sequences": _same("n"),
    "return_log_probs": _same("return_log_probs"),
    "return_context_logits": _same("return_context_logits"),
    "return_generation_logits": _same("return_generation_logits"),
    **{f"return_{name}": InputTensor("BOOL", Parameter(name, _FLAG)) for name in EXTRAS},
    "guided_decoding_guide_type": InputTensor("BYTES", Parameter("", _guide)),  # `join_guide` removes it
    "guided_decoding_guide": InputTensor("BYTES", Parameter("structured_output", _guide)),
    "lora_task_id": _same("lora_task_id"),
    "lora_name": InputTensor("BYTES", Parameter("adapter", _adapter_name, informed=True)),
    # vLLM's sampling parameters
    "sampling_parameters": InputTensor("BYTES", Parameter("", single(string))),  # `join_sampling` reads it
    **{row.lmi: _same(row.lmi) for row in ROWS if row.triton},
    "structured_outputs": InputTensor("BYTES", Parameter("structured_output", _structured_outputs)),
    # refused
    "decoder_text_input": _never("BYTES", "encoder-decoder models are not supported"),
    "image_input": _never("FP16", _MEDIA),
    "image_bytes_input": _never("UINT8", _MEDIA),
    "image_url_input": _never("BYTES", _MEDIA),
    "image_url": _never("BYTES", _MEDIA),
    "prompt_embedding_table": _never("FP16", _EMBEDDINGS),
    "prompt_table_extra_id": _never("UINT64", _EMBEDDINGS),
    "prompt_vocab_size": _never("INT32", _EMBEDDINGS),
    "embedding_bias_words": _never("BYTES", _BIAS),
    "embedding_bias_weights": _never("FP32", _BIAS),
    "lora_weights": InputTensor("FP16", TENSORS["lora_weights"]),
    "lora_config": InputTensor("INT32", TENSORS["lora_config"]),
    "lora_path": _never("BYTES", "register the adapter, then send lora_name or lora_task_id"),
    "return_stop_reason": _never(
        "BOOL", "the stop word that ended a response is not reported; use return_finish_reason"
    ),
    "return_perf_metrics": _never("BOOL", _METRICS),
    "return_kv_cache_reuse_stats": _never("BOOL", _METRICS),
}

_ALIASES = {
    "min_tokens": "min_length",
    "seed": "random_seed",
    "lora_id": "lora_task_id",
    "guided_decoding": "structured_outputs",
    # the llmapi model
    "streaming": "stream",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "random_seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    **{f"sampling_param_{name}": name for name in ("max_tokens", "temperature", "top_k", "top_p", "best_of")},
    **{f"sampling_param_{name}": name for name in ("presence_penalty", "frequency_penalty", "return_perf_metrics")},
}
"""Maps alternative input names to the names in `_ROWS`."""

INPUTS: Mapping[str, InputTensor] = {**_ROWS, **{alias: _ROWS[name] for alias, name in _ALIASES.items()}}
"""All inputs except the prompt. Parameters that are not fields of Sampling are stored in `ParsedParameters.others`."""

OF_OTHER_MODELS: Mapping[str, InputTensor] = {
    # tensorrt_llm, whose further inputs are also inputs of `generate`
    IDS: InputTensor("INT32", TENSORS["input_ids"], (-1,)),
    "input_lengths": InputTensor("INT32", Parameter("num_prompt_ids", single(integer(0), "[1,1]"))),
    "request_output_len": InputTensor("INT32", TENSORS["request_output_len"]),
    "runtime_top_k": INPUTS["top_k"],
    "runtime_top_p": INPUTS["top_p"],
    "len_penalty": INPUTS["length_penalty"],
    "stop_words_list": InputTensor("INT32", TENSORS["stop_words_list"], (2, -1)),
    "bad_words_list": InputTensor("INT32", TENSORS["bad_words_list"], (2, -1)),
    "embedding_bias": InputTensor("FP32", TENSORS["embedding_bias"], (-1,)),
    "beam_search_diversity_rate": _never("FP32", "the engines have no diverse beam search"),
    # the ensemble of 2023
    "INPUT_1": InputTensor("UINT32", INPUTS["max_tokens"].parameter),
    "INPUT_2": INPUTS["bad_words"],
    "INPUT_3": INPUTS["stop_words"],
}
"""The inputs of models other than the model of `generate`. Only `infer` reads these inputs."""

TABLE = Table({name: input.parameter for name, input in (*INPUTS.items(), *OF_OTHER_MODELS.items())})

LLMAPI = ("sampling_param_", "streaming")
"""Prefixes of the input names of the llmapi model. By default, its responses omit the prompt."""


# -- texts -------------------------------------------------------------------------------------------------------

_FLAGS = {"true": True, "True": True, "false": False, "False": False}
TEXTS: Mapping[str, Callable[[str], Any]] = {"INT32": int, "UINT64": int, "FP32": float, "BOOL": _FLAGS.__getitem__}
"""Maps a datatype to the function that converts a string to a value."""


def from_text(name: str, value: Any) -> Any:
    """Convert the string of an input to a number or flag, as vLLM's backend does. Return other values unchanged."""
    read = TEXTS.get(INPUTS[name].datatype) if isinstance(value, str) and name in INPUTS else None
    try:
        return value if read is None else read(value)
    except (ValueError, KeyError):
        return value  # the parameter's reader refuses it


# -- rules between inputs ----------------------------------------------------------------------------------------

_BESIDE_SAMPLING = frozenset(
    {"stream", "exclude_input_in_output"} | {name for name in INPUTS if name.startswith("return_")}
)
_SAMPLING = "sampling_parameters"


def join_sampling(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace all other sampling parameters with those in `sampling_parameters`, as vLLM's backend does.

    Returns:
        The inputs, and the names that have no effect.

    Raises:
        InvalidParameter: `sampling_parameters` is not a JSON object in a string.
    """
    if _SAMPLING not in inputs:
        return dict(inputs), []
    text = _unpack(inputs[_SAMPLING])
    try:
        params = loads(text) if isinstance(text, str) else None
    except ValueError:
        params = None
    if not isinstance(params, dict):
        raise InvalidParameter(f"{_SAMPLING}={show(text)}: must be a JSON object in a string")
    params = {name: from_text(name, value) for name, value in params.items() if value is not None}
    sampling = {
        name: value for name, value in params.items() if name in INPUTS and name not in (*_BESIDE_SAMPLING, _SAMPLING)
    }
    beside = {name: value for name, value in inputs.items() if name in _BESIDE_SAMPLING or name == _SAMPLING}
    replaced = [name for name, value in inputs.items() if name not in beside and params.get(name) != value]
    return {**beside, **sampling}, [*(f"{_SAMPLING}.{name}" for name in params if name not in sampling), *replaced]


def join_guide(values: Mapping[str, Any]) -> dict[str, Any]:
    """Join the two inputs of guided decoding into one.

    Raises:
        InvalidParameter: guided_decoding_guide_type is missing or unknown.
    """
    inputs = dict(values)
    kind = _unpack(inputs.pop("guided_decoding_guide_type", ""))
    structured_output = _unpack(inputs.pop("guided_decoding_guide", ""))
    if kind == "":
        if structured_output != "":
            raise InvalidParameter(f"guided_decoding_guide={show(structured_output)}: needs guided_decoding_guide_type")
        return inputs
    if not isinstance(kind, str) or kind not in _GUIDE_READERS:
        raise InvalidParameter(f"guided_decoding_guide_type={show(kind)}: must be one of {', '.join(_GUIDE_READERS)}")
    return {**inputs, "guided_decoding_guide": {kind: structured_output}}


def defaults(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of Sampling that depend on the inputs. With `sampling_parameters`, vLLM's defaults apply."""
    limit = {"max_new_tokens": _VLLM_MAX_TOKENS} if _SAMPLING in inputs else {}
    return {"do_sample": _samples(inputs), **limit}


_VLLM_MAX_TOKENS = 16


def _samples(inputs: Mapping[str, Any]) -> bool:
    """Return whether the inputs request sampling, according to the rules of TensorRT-LLM's LLM API.

    Raises:
        InvalidParameter: the parameters request both sampling and beam search.
    """
    temperature = _number(inputs, "temperature", "sampling_param_temperature")
    if _SAMPLING in inputs:
        return temperature != 0  # vLLM's rule
    k = _number(inputs, "top_k", "sampling_param_top_k", "runtime_top_k")
    p = _number(inputs, "top_p", "sampling_param_top_p", "runtime_top_p")
    beams = _number(inputs, "beam_width")
    if temperature == 0 or k == 1:
        return False
    if beams is None or beams <= 1:
        return temperature is not None or bool(k and k > 1) or bool(p)
    if temperature not in (None, 1) or (k and k > 1) or (p and p < 1):
        raise InvalidParameter(f"beam_width={beams}: beam search does not sample; omit temperature, top_k and top_p")
    return False


def _number(inputs: Mapping[str, Any], *names: str) -> float | None:
    """Return the value of the first input of `names` that is present, or None if it is not a number."""
    for name in names:
        if name in inputs:
            value = _unpack(inputs[name])
            return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    return None


def _unpack(value: Any) -> Any:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


class Route(Enum):
    """The kind of route. SHAPE is a path that dialects share, where `stream` in the body decides whether to stream."""

    GENERATE = "generate"
    STREAM = "generate_stream"
    SHAPE = "shape"


def _body(context: ServerContext) -> Shape:
    inputs = {
        name: {"anyOf": [shape, TEXT]} if INPUTS[name].datatype in TEXTS else shape
        for name, shape in parameters(TABLE.parameters, context).items()
        if name in INPUTS
    }
    text = {PROMPT: {"anyOf": [TEXT, listing(TEXT, minItems=1, maxItems=1)]}}
    return record(
        {}, {**text, "id": TEXT, "parameters": {"type": "object", "properties": {**text, **inputs}}, **inputs}
    )


class Triton(Dialect):
    """The dialect of `/generate`, `/generate_stream`, and bodies with `text_input` on shared routes."""

    errors = ERRORS
    any_media = True  # Triton ignores the content type
    unique_keys = True

    def __init__(self, route: Route) -> None:
        self.name = f"triton_{route.value}"
        self._route = route
        self.description = Description(
            title="Triton",
            request="TritonRequest",
            request_shape=_body,
            error=TritonError,
            example={"text_input": "The capital of France is", "max_tokens": 8, "exclude_input_in_output": True},
            # Triton also uses status 200 for the error that a model sends more responses than the route allows.
            response=None if route is Route.STREAM else TritonResponse | TritonError,
            chunk=None if route is Route.GENERATE else TritonResponse,
            streams=() if route is Route.GENERATE else (SSE.content_type,),
        )

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload("attempt to get members for non-object")
        head = head_of(read_id(body), request_context.model or context.model_names[0])
        inputs, unknown = _read_names(body)
        options, parameters, ignored = read_inputs(inputs, unknown, head, body, context, self._streams)
        request, streams = options.request, self._streams(parameters)
        errors = TritonErrors(events=True)
        if streams:
            check_single_sequence(request.sampling, parameters)
            return ParsedRequest((request,), TritonStream(options, errors), errors, ignored, streams=True)
        if self._route is Route.STREAM:
            return ParsedRequest((request,), TritonDocument(options, EVENTS), errors, ignored, streams=True)
        return ParsedRequest((request,), TritonDocument(options), self.errors, ignored)

    def _streams(self, parameters: ParsedParameters) -> bool:
        """Return whether to send one response per token.

        Unlike TensorRT-LLM's model, which streams only if `stream` is true, `/generate_stream` streams by default.
        """
        stream = parameters.others.get("stream")
        if self._route is Route.STREAM:
            return stream is not False
        if stream and self._route is Route.GENERATE:
            raise OneResponse
        return bool(stream)


def head_of(id: str, model: str) -> TritonHead:
    """Return the fields that each response repeats. The id is omitted if it is empty."""
    head: TritonHead = {"model_name": model, "model_version": VERSION}
    if id:
        head["id"] = id
    return head


def read_inputs(
    inputs: dict[str, Any],
    unknown: Sequence[str],
    head: TritonHead,
    body: Mapping[str, Any],
    context: ServerContext,
    streams: Callable[[ParsedParameters], bool],
) -> tuple[ResponseOptions, ParsedParameters, list[str]]:
    """Read the inputs of a request.

    Args:
        inputs: the inputs by name; the prompt is removed.
        unknown: names in the body that are not inputs.
        head: the fields that each response repeats.
        body: the body that contains the unknown names.
        streams: returns whether the response is a stream of tokens.

    Returns:
        The options of the responses, the parameters, and the names that have no effect.

    Raises:
        InvalidPayload, InvalidParameter: an input is missing or invalid.
    """
    prompt = "" if IDS in inputs else _read_prompt(inputs, head)
    inputs, replaced = join_sampling(inputs)
    inputs = join_guide(inputs)
    parameters = read_all(inputs, context, defaults=defaults(inputs), table=TABLE)
    ignored = report_unknown(body, body, context, [*unknown, *replaced])
    request = _request(prompt, parameters, context, ignores_end=inputs.get("ignore_eos") in (True, [True]))
    request = request._replace(id=head.get("id", ""))
    is_excluded = _without_prompt(inputs, parameters, streams(parameters))
    options = ResponseOptions(
        request,
        head,
        select_tensors(parameters, () if request.prompt_ids is None else ("output_ids", "sequence_length")),
        frozenset(name for name in EXTRAS if parameters.others.get(name)),
        "" if is_excluded else prompt,
        () if is_excluded or streams(parameters) or request.prompt_ids is None else request.prompt_ids,
    )
    return options, parameters, ignored


def wrong_type(name: str, kind: str) -> InvalidPayload:
    return InvalidPayload(f"Unable to parse '{name}': attempt to access JSON non-{kind} as {kind}")


def read_id(body: Mapping[str, Any]) -> str:
    """Return the request id, or "" if there is none.

    Raises:
        InvalidPayload: the id is not a string, or is too long.
    """
    id = body.get("id", "")
    if not isinstance(id, str):
        raise wrong_type("id", "string")
    if len(id) > MAX_NAME:  # each response repeats it
        raise InvalidPayload(f"Unable to parse 'id': it has {len(id)} characters; the maximum is {MAX_NAME}")
    return id


# -- reading -----------------------------------------------------------------------------------------------------


def _read_names(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the inputs, from the top level or from `parameters`, and the names of unknown fields.

    Unknown fields must have a type that Triton allows for request parameters.
    """
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidPayload("Expected JSON object for keyword: 'parameters'")
    inputs: dict[str, Any] = {}
    unknown: list[str] = []
    for prefix, names in (("", body), ("parameters.", parameters)):
        for name, value in names.items():
            if not prefix and name in ("id", "parameters"):
                continue
            if value is None or isinstance(value, dict) or (isinstance(value, list) and not _is_input(name)):
                raise _wrong_kind(name, "Converting keyword: 'parameters': " if prefix else "")
            if not _is_input(name):
                unknown.append(prefix + name)
            elif name in inputs:
                raise InvalidPayload(f"input '{name}' already exists in request")
            else:
                inputs[name] = from_text(name, value)
    return inputs, unknown


def _wrong_kind(name: str, where: str) -> InvalidParameter:
    kinds = "It should be either 'int', 'bool', or 'string'."
    return InvalidParameter(f"{where}parameter '{name[:64]}' has invalid type. {kinds}")


def _is_input(name: str) -> bool:
    return name == PROMPT or name in INPUTS


def _read_prompt(inputs: dict[str, Any], head: TritonHead) -> str:
    """Remove the prompt from the inputs and return it."""
    name = PROMPT if PROMPT in inputs else PROMPT_2023
    if name not in inputs:
        expected = f"expected number of inputs between 1 and {len(INPUTS) + 1} but got {len(inputs)} inputs"
        raise InvalidPayload(
            f"[request id: {head.get('id', '<id_unknown>')}] {expected} for model '{head['model_name']}'. Got input(s) "
            f"{sorted(inputs)}, but missing required input(s) ['{PROMPT}']. Please provide all required input(s)."
        )
    prompt = inputs.pop(name)
    if isinstance(prompt, list):
        if len(prompt) != 1:
            raise InvalidPayload(f"The schema can not convert input '{name}' to tensor with proper shape")
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise wrong_type(name, "string")
    return prompt


def _request(prompt: str, parameters: ParsedParameters, context: ServerContext, *, ignores_end: bool) -> Request:
    sampling, names, end_id = parameters.sampling, parameters.names, parameters.others.get("end_id")
    ids = _read_ids(parameters)
    if ids is not None:
        assert context.vocabulary is not None, "token ids are refused without a vocabulary"
        prompt = context.vocabulary.decode(ids)
    if end_id is not None and sampling.ignore_eos:  # it replaces the model's own end tokens
        if ignores_end:
            raise InvalidParameter(f"end_id={end_id}: contradicts ignore_eos=true")
        sampling = sampling._replace(stop_token_ids=(*sampling.stop_token_ids, end_id))
    ranked = sampling.num_sequences > 1 or bool(parameters.others.get("cumulative_logprob"))
    return Request(
        prompt=prompt,
        prompt_ids=ids,
        sampling=sampling._replace(logprobs=ranked or bool(parameters.others.get("return_log_probs"))),
        adapter=parameters.others.get("adapter"),
        eos_token_id=end_id,
        names=FieldNames(
            prompt=PROMPT if ids is None else IDS,
            max_new_tokens=names.get("max_new_tokens", "max_tokens"),
            stop_token_ids="end_id",
            bad_token_ids="bad_words_list",
            logit_bias="embedding_bias",
            logits=names.get("return_generation_logits", "return_context_logits"),
            structured_output="guided_decoding_guide",
        ),
    )


def _read_ids(parameters: ParsedParameters) -> tuple[int, ...] | None:
    """Return the token ids of the prompt without padding, or None if the prompt is text.

    Raises:
        InvalidParameter: input_lengths is below 1, or exceeds the number of ids.
    """
    ids: tuple[int, ...] | None = parameters.others.get("prompt_ids")
    length = parameters.others.get("num_prompt_ids")
    if ids is None or length is None:
        return ids
    if not 1 <= length <= len(ids):
        raise InvalidParameter(f"input_lengths={length}: must be from 1 to {len(ids)}, the number of input_ids")
    return ids[:length]


def _without_prompt(inputs: Mapping[str, Any], parameters: ParsedParameters, streams: bool) -> bool:
    """Return whether the response omits the prompt. Streams and the llmapi model do so by default."""
    exclude = parameters.others.get("exclude_prompt")
    if exclude is not None:
        return bool(exclude)
    return streams or any(name.startswith(LLMAPI) for name in inputs)


def check_single_sequence(sampling: Sampling, parameters: ParsedParameters) -> None:
    for field in ("n", "best_of", "num_beams"):
        if (count := getattr(sampling, field)) > 1:
            raise InvalidParameter(f"{parameters.names[field]}={show(count)}: must be 1 when streaming")

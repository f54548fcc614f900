"""The generation parameters. Each has a Sampling field, a type, a range, and a name in each dialect.

Source: docs.djl.ai, "LMI handlers Inference API Schema" (0.28). A null value counts as absent. Unless it is neutral,
a value that the engine does not support is refused with an error that names the parameter. Without
`do_sample`, sampling values are checked but have no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import InvalidParameter
from handler.core.framing import FRAMINGS, Framing
from handler.core.values import SAMPLED, Nature, Sampling, fields_of
from handler.protocols.kernel.context import GenerationDefaults, RequestShape, ServerContext
from handler.protocols.kernel.readers import (
    INT32,
    INT64,
    STRING_OR_STRINGS,
    NamedValue,
    allowed_token_ids,
    boolean,
    cache_salt,
    choice,
    grammar,
    integer,
    json_object,
    json_schema,
    logit_bias,
    named_adapter,
    number,
    regex,
    strings,
    tgi_grammar,
    token_ids,
)
from handler.protocols.kernel.schema import Shape, accepts, nullable, record, schema_of_reader

SAMPLING_DEFAULTS = Sampling._field_defaults

_ONLY_WITH_BEAMS = fields_of(Nature.ONLY_BEAMS)
_OF_SOME_NATURE = frozenset(fields_of(~Nature(0)))

MAX_TOP_TOKENS = 20  # alternatives to a token: OpenAI's limit, and vLLM's default; TGI's is 5

ANY = 1 << 30
"""The `max_new_tokens` of a request whose response may fill the context. The request also has `fill_context`."""

UINT64 = (1 << 64) - 1

_PLAIN = frozenset({bool, int, float, type(None)})
"""Types of small values whose meaning does not depend on the request or on registered adapters."""

_MOST_PARSED = 256  # sets of such values in the cache

SEVERAL = "*"
"""The `field` of a parameter whose `read` returns a mapping of fields to values."""


class Parameter(NamedTuple):
    """A parameter of a request: the field that it sets, and the reader of its value.

    Attributes:
        field: the field that it sets, or "" if the parameter has no effect. A field that is not in Sampling is stored
            in `ParsedParameters.others`.
        read: converts a JSON value to a field value, or raises ValueError with a message that describes valid values.
            None means that the value is valid but has no effect.
        informed: whether `read` takes the server context as its second argument.
    """

    field: str
    read: Callable[..., Any]
    informed: bool = False


def equals_any(value: Any, candidates: Iterable[Any]) -> bool:
    """Return whether a JSON value equals any of the others. Unlike in Python, a boolean never equals a number."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in candidates)


def _shape_of(values: Sequence[Any]) -> Shape:
    """Return the schema of a value that is null or one of `values`."""
    if not values:
        return {"type": "null"}
    shape: Shape = {"const": values[0]} if len(values) == 1 else {"enum": [*values]}
    return {**shape, "type": "number"} if {*map(type, values)} <= {int, float} else shape


def unsupported(reason: str, *neutral: Any) -> Parameter:
    """Return a parameter that accepts only neutral values.

    Args:
        reason: the reason why other values are not supported, for the error message.
    """

    @accepts(**_shape_of(neutral))
    def read(value: Any) -> None:
        if not equals_any(value, neutral):
            raise ValueError(f"is not supported: {reason}")

    return Parameter("", read)


class ParsedParameters(NamedTuple):
    """The values of the parameters that a client sent.

    Attributes:
        names: maps each field that the client has set to the client's name for it.
        others: the values of fields that are not in Sampling, by field.
    """

    sampling: Sampling
    names: Mapping[str, str]
    others: Mapping[str, Any]


STRICT = "tools[].function.strict"


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The parameters of a dialect by name.

    Attributes:
        prefix: the path that contains the parameters in a body.
        translated: the paths in a client's body of the fields that are translated to parameters, by the parameter's
            name. That of `STRICT` is among them.
    """

    parameters: Mapping[str, Parameter]
    prefix: str = ""
    translated: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The JSON schema of each parameter, by name."""
        return {name: schema_of_reader(parameter.read) for name, parameter in self.parameters.items()}

    def name_of(self, field: str) -> str:
        """Return the client's name for a field, which is the first parameter that sets it, or else the field itself."""
        names = (self.path_of(name) for name, item in self.parameters.items() if item.field == field)
        return next(names, field)

    def path_of(self, name: str) -> str:
        """Return the path of a parameter in a client's body."""
        return f"{self.prefix}{self.translated.get(name, name)}"


@accepts(type="integer", minimum=-1, maximum=INT32)
def top_k(value: Any) -> int:
    return max(integer(-1)(value), 0)  # both -1 (vLLM, LmiDist) and 0 (LMI) mean all tokens


@accepts(anyOf=[*STRING_OR_STRINGS, {"const": False}])
def stop(value: Any) -> tuple[str, ...]:
    return () if value is False else strings(value)  # LMI's document calls TensorRT-LLM's `stop` a boolean


@accepts(type="integer", minimum=0, maximum=1)
def _flag_of_count(value: Any) -> bool:
    return bool(integer(0, 1)(value))  # 1 asks for the log-probability of each prompt token, without alternatives


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def _alternatives(value: Any) -> int:
    count = integer(0, MAX_TOP_TOKENS)(value)
    return count if count > 1 else 0  # 1 asks only for the chosen token's log-probability, which every token has


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def _top_tokens(value: Any, context: ServerContext) -> int:
    """Read TGI's `top_n_tokens`. A count of 1 requests the most likely token, which may not be the chosen token."""
    count = integer(0, MAX_TOP_TOKENS)(value)
    if count and (reason := context.unsupported.get("top_logprobs")):
        raise ValueError(f"the engine {context.engine} does not support it: {reason}")
    return count


@accepts(type="integer", minimum=-INT64 - 1, maximum=UINT64)
def _signed_seed(value: Any) -> int:
    """Read a seed, which may be negative, as in OpenAI and vLLM. Return it as an unsigned 64-bit integer."""
    return integer(-INT64 - 1, UINT64)(value) % (UINT64 + 1)


class TableRow(NamedTuple):
    """The declaration of a parameter: its range, and its name in each dialect that reads it in this way.

    The type, the default and the neutral value of the result are those of the field in Sampling.

    Attributes:
        field, read, informed: the attributes of `Parameter`.
        lmi: the name in rolling batch and dynamic batch, with or without TGI_COMPAT. TGI and MindIE use the same names.
        openai: the name in chats and completions, including those of vLLM's clients.
        responses: the name in OpenAI's Responses.
        vllm_responses: whether vLLM's Responses have the parameter too, under its name in chats.
        triton: whether Triton's vLLM backend has the parameter, under its name in LMI.
        neutral: the JSON values that request nothing, so that a dialect without the parameter does not report them.
            None means the field's default.
        of_model: whether generation_config.json may set the default, as in vLLM.
    """

    field: str
    read: Callable[..., Any]
    lmi: str = ""
    openai: str = ""
    anthropic: str = ""
    responses: str = ""
    vllm_responses: bool = False
    triton: bool = False
    neutral: Collection[Any] | None = None
    of_model: bool = False
    informed: bool = False


ROWS = (
    # common to all of LMI's backends
    TableRow("do_sample", boolean, lmi="do_sample", neutral=()),
    TableRow("seed", integer(0, UINT64), lmi="seed"),
    TableRow("temperature", number(0), lmi="temperature", neutral=(), of_model=True),
    TableRow(
        "repetition_penalty", number(0, above=True), lmi="repetition_penalty", openai="repetition_penalty",
        vllm_responses=True, of_model=True,
    ),
    TableRow(
        "top_k", top_k, lmi="top_k", openai="top_k", anthropic="top_k",
        vllm_responses=True, neutral=(0, -1), of_model=True,
    ),
    TableRow(
        "top_p", number(0, 1), lmi="top_p", openai="top_p", anthropic="top_p", responses="top_p",
        of_model=True,
    ),
    TableRow(
        "max_new_tokens", integer(1), lmi="max_new_tokens", openai="max_tokens", responses="max_output_tokens",
        neutral=(), of_model=True,
    ),
    TableRow(
        "stop", strings, lmi="stop_sequences", openai="stop", anthropic="stop_sequences", vllm_responses=True,
        neutral=([],),
    ),
    # LmiDist and vLLM
    TableRow("typical_p", number(0, 1, above=True), lmi="typical_p"),
    TableRow("min_p", number(0, 1, below=True), lmi="min_p", openai="min_p", vllm_responses=True, of_model=True),
    TableRow(
        "presence_penalty", number(-2, 2), lmi="presence_penalty", openai="presence_penalty",
        responses="presence_penalty", of_model=True,
    ),
    TableRow(
        "frequency_penalty", number(-2, 2), lmi="frequency_penalty", openai="frequency_penalty",
        responses="frequency_penalty", of_model=True,
    ),
    TableRow("n", integer(1), lmi="n", openai="n", triton=True),
    TableRow("best_of", integer(1), lmi="best_of", triton=True),
    TableRow("num_beams", integer(1), lmi="num_beams"),
    TableRow("length_penalty", number(-20, 20), lmi="length_penalty"),
    TableRow("early_stopping", boolean, lmi="early_stopping"),
    TableRow("ignore_eos", boolean, lmi="ignore_eos_token", openai="ignore_eos", vllm_responses=True),
    TableRow(
        "stop_token_ids", token_ids, lmi="stop_token_ids", openai="stop_token_ids",
        vllm_responses=True, triton=True, neutral=([],),
    ),
    TableRow(
        "include_stop", boolean, lmi="include_stop_str_in_output", openai="include_stop_str_in_output",
        vllm_responses=True, triton=True,
    ),
    TableRow("top_logprobs", _alternatives, lmi="logprobs", neutral=()),
    TableRow("prompt_logprobs", _flag_of_count, lmi="prompt_logprobs", neutral=()),
    TableRow("prompt_logprobs", boolean, lmi="decoder_input_details"),
    TableRow(
        "skip_special_tokens", boolean, lmi="skip_special_tokens", openai="skip_special_tokens",
        vllm_responses=True, triton=True,
    ),
    # Tokens are joined as bytes, without anything between them.
    TableRow(
        "", boolean, lmi="spaces_between_special_tokens", openai="spaces_between_special_tokens",
        vllm_responses=True, neutral=(True,),
    ),
    TableRow("logit_bias", logit_bias, lmi="logit_bias", openai="logit_bias", vllm_responses=True, neutral=({},)),
    TableRow("structured_output", json_schema, lmi="guided_json", openai="guided_json"),
    TableRow("structured_output", json_object, lmi="guided_json_object", openai="guided_json_object"),
    TableRow("structured_output", regex, lmi="guided_regex", openai="guided_regex"),
    TableRow("structured_output", choice, lmi="guided_choice", openai="guided_choice"),
    TableRow("structured_output", grammar, lmi="guided_grammar", openai="guided_grammar"),
    # TensorRT-LLM
    TableRow("min_new_tokens", integer(0), lmi="min_length", openai="min_tokens"),
    TableRow("bad_sequences", strings, lmi="bad_sequences", openai="bad_words", neutral=([],)),
    TableRow("stop", stop, lmi="stop", neutral=([],)),
    # parameters of TGI, which its clients also send to LMI
    TableRow("top_logprobs", _top_tokens, lmi="top_n_tokens", informed=True),
    TableRow("", unsupported("no engine supports watermarks", False).read, lmi="watermark", neutral=(False,)),
    TableRow("structured_output", tgi_grammar, lmi="grammar"),
    TableRow("adapter", named_adapter, lmi="adapter_id", informed=True),
    # parameters of vLLM's chats and completions
    TableRow("allowed_token_ids", allowed_token_ids, lmi="allowed_token_ids", openai="allowed_token_ids", neutral=()),
    TableRow(
        "cache_salt", cache_salt, lmi="cache_salt", openai="cache_salt", anthropic="cache_salt", vllm_responses=True,
        neutral=(),
    ),
    TableRow("priority", integer(-INT64 - 1, INT64), lmi="priority", openai="priority", vllm_responses=True),
    # parameters that have another range in OpenAI's API
    TableRow("seed", _signed_seed, openai="seed", vllm_responses=True),
    TableRow("temperature", number(0, 2), openai="temperature", neutral=()),
)  # fmt: skip
"""The declarations of all generation parameters that several dialects have."""

NEUTRAL_VALUES: Mapping[str, Collection[Any]] = {
    name: [SAMPLING_DEFAULTS.get(row.field)] if row.neutral is None else row.neutral
    for row in ROWS
    for name in (row.lmi, row.openai)
}
"""Maps each name in LMI and OpenAI to the JSON values that request nothing."""

LMI_NEUTRAL: Mapping[str, Collection[float]] = {
    **{field: {SAMPLING_DEFAULTS[field]} for field in SAMPLED},
    "temperature": {0},  # sending 1, the default, asks for sampling
    "top_k": {0, 1},
    "top_p": {0, 1},
}
"""The values of LMI's sampling parameters, by field, that select the most likely token or have no effect."""

LMI_NEUTRAL_IF_GREEDY = {**LMI_NEUTRAL, "temperature": {0, 1}, "top_k": {0, 1, 50}}
"""The values, by field, that are not reported if `do_sample` is false, such as the defaults of LMI and transformers."""


def dialect_parameters(dialect: str) -> dict[str, Parameter]:
    """Return the parameters of a dialect, by their names in the dialect.

    Args:
        dialect: the attribute of `TableRow` that contains these names.
    """
    return {name: Parameter(row.field, row.read, row.informed) for row in ROWS if (name := getattr(row, dialect))}


PARAMETERS: Mapping[str, Parameter] = dialect_parameters("lmi")

LMI = Table(PARAMETERS, "parameters.")

MODEL_DEFAULTS: Mapping[str, Callable[[Any], Any]] = {row.field: row.read for row in ROWS if row.of_model}
"""Readers of the values that are used from generation_config.json, as in vLLM. The keys are fields of Sampling."""

_OTHER_FORMATTERS = ("none", "json_chat", "jsonlines_chat", "sse_chat", "3p", "3p_stream")
"""LMI output formatters that cannot format responses to prompts."""


@accepts(enum=[*FRAMINGS])
def _formatter(value: Any) -> Framing | None:
    """Read `output_formatter`, or return None for a name that LMI does not know.

    Such a name only disables the formatter of the option (djl_python/output_formatter.py, `get_output_formatter`).
    """
    if not isinstance(value, str):
        return None
    if value in _OTHER_FORMATTERS:
        raise ValueError("cannot format responses to prompts")
    return FRAMINGS.get(value)


REQUEST_FIELDS: dict[str, Callable[[Any], Any]] = {
    "details": boolean,
    "return_full_text": boolean,
    "truncate": integer(1),
    "stream": boolean,
    "output_formatter": _formatter,
}
"""Maps fields of `parameters` that do not control the sampling to their readers."""


def read_sampled(
    params: Mapping[str, Any],
    context: ServerContext,
    *,
    generation: GenerationDefaults,
    max_new_tokens: int | None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    table: Table,
) -> ParsedParameters:
    """Read parameters as vLLM does: a request samples unless its temperature is 0.

    A missing parameter takes the model's default value, if there is one.

    Args:
        params, context, table: the same as in `read_all`.
        generation: the model's defaults, usually from the context.
        max_new_tokens: the maximum number of new tokens if the client sets none. None means the model's default, or as
            many tokens as fit in the context if the model has no default.
        defaults: the values of other Sampling fields whose defaults differ. They override the model's defaults, and
            are refused if the engine does not support them (`context.unsupported`).

    Raises:
        InvalidParameter: a parameter is invalid, as in `read_all`.
    """
    temperature = params.get("temperature")
    if temperature is None:
        temperature = generation.sampling.get("temperature")
    sampled_defaults = {
        **generation.sampling,
        "do_sample": temperature != 0,  # a temperature that is not a number is refused below
        "max_new_tokens": max_new_tokens or generation.max_new_tokens or ANY,
        **defaults,
    }
    return read_all(params, context, defaults=sampled_defaults, table=table, most_new_tokens=generation.most_new_tokens)


def read_all(
    params: Mapping[str, Any],
    context: ServerContext,
    *,
    defaults: Mapping[str, Any],
    table: Table,
    most_new_tokens: int | None = None,
) -> ParsedParameters:
    """Read all parameters in `params` that the table lists.

    The result is cached if all values are numbers or booleans, because most clients send the same values again.

    Args:
        params: the client's parameters, including names that other readers read.
        context: the server context, which contains the name and limits of the engine.
        defaults: the values of Sampling fields whose defaults differ in this dialect.
        table: the dialect's parameters.
        most_new_tokens: the maximum of `max_new_tokens`, or None for no maximum. Larger values are reduced to it, as in
            vLLM.

    Raises:
        InvalidParameter: a parameter is invalid. The message states its name, its value and the valid values.
    """
    params = {name: value for name, value in params.items() if value is not None and name in table.parameters}
    all_values = (*params.values(), *defaults.values())
    kinds = tuple(map(type, all_values))
    if not are_plain(kinds):
        return _read(params, context, defaults, table, most_new_tokens)
    key = table, most_new_tokens, tuple(params), tuple(defaults), all_values, kinds
    parsed: ParsedParameters | None = context.parsed.get(key)
    if parsed is None:
        parsed = _read(params, context, defaults, table, most_new_tokens)
        remember(key, parsed, context)
    return parsed


def remember(key: tuple[Any, ...], value: Any, context: ServerContext) -> None:
    """Store what was read from a set of plain values in `context.parsed`."""
    if len(context.parsed) >= _MOST_PARSED:
        context.parsed.clear()
    context.parsed[key] = value


def are_plain(kinds: Iterable[type]) -> bool:
    """Return whether values of these types are numbers, booleans or null."""
    return _PLAIN.issuperset(kinds)


def _read(
    params: Mapping[str, Any],
    context: ServerContext,
    defaults: Mapping[str, Any],
    table: Table,
    most_new_tokens: int | None,
) -> ParsedParameters:
    values: dict[str, Any] = dict(defaults)
    names: dict[str, NamedValue] = {}
    for field, value, sent in _fields(params, context, table):
        if field in names and values[field] != value:
            raise InvalidParameter(f"{sent} contradicts {names[field].name}")
        values[field], names[field] = value, sent
    options = {field: values.pop(field) for field in [*values] if field not in SAMPLING_DEFAULTS}
    sampling = Sampling(**values)
    if most_new_tokens is not None:
        sampling = sampling._replace(max_new_tokens=min(sampling.max_new_tokens, most_new_tokens))
    _check_agreement(sampling, names, context, table)
    _check_support(sampling, values, names, context)
    by_field = {field: sent.name for field, sent in names.items()}
    return ParsedParameters(sampling, MappingProxyType(by_field), MappingProxyType(options))


def _fields(params: Mapping[str, Any], context: ServerContext, table: Table) -> Iterator[tuple[str, Any, NamedValue]]:
    """Yield each field that a parameter sets, with its value and the parameter."""
    for name, value in params.items():
        parameter, sent = table.parameters[name], NamedValue(table.path_of(name), value)
        try:
            result = parameter.read(value, context) if parameter.informed else parameter.read(value)
        except ValueError as error:
            raise sent.refused(str(error)) from None
        for field, item in (result if parameter.field == SEVERAL else {parameter.field: result}).items():
            if field and item is not None:
                yield field, item, sent


def _check_agreement(sampling: Sampling, names: Mapping[str, NamedValue], context: ServerContext, table: Table) -> None:
    """Raise InvalidParameter if parameters contradict each other."""

    def sent(field: str) -> NamedValue:
        if field == "structured_output" and field not in names:
            return NamedValue(table.path_of(STRICT), True)  # only strict tools set it without a parameter
        return names.get(field) or NamedValue(table.name_of(field), getattr(sampling, field))

    def limit(field: str) -> str:
        return str(sent(field)._replace(value=getattr(sampling, field)))

    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise sent("min_new_tokens").refused(f"must be at most {limit('max_new_tokens')}")
    if "best_of" in names and sampling.best_of < sampling.n:
        raise sent("best_of").refused(f"must be at least {limit('n')}")
    most = context.config.max_rolling_batch_size
    for field in ("n", "best_of", "num_beams"):
        if getattr(sampling, field) > most:
            raise sent(field).refused(f"must be at most {most} (option.max_rolling_batch_size)")
    if sampling.structured_output is not None:
        for field in ("ignore_eos", "min_new_tokens"):
            if getattr(sampling, field) != SAMPLING_DEFAULTS[field]:
                raise sent(field).refused(
                    f"structured output decides where the response ends; omit {sent('structured_output').name}"
                )
    refuse, conflict = _ONLY_WITH_BEAMS, "has an effect only with"
    if sampling.num_beams > 1:
        if sampling.do_sample:
            raise sent("num_beams").refused(f"beam search does not sample; omit {sent('do_sample')}")
        for field in ("n", "best_of"):
            if getattr(sampling, field) > sampling.num_beams:
                raise sent("num_beams").refused(f"must be at least {limit(field)}")
        refuse = [name for name in SAMPLING_DEFAULTS if name not in _OF_SOME_NATURE]
        conflict = "is not available with"
    for field in refuse:
        if getattr(sampling, field) != SAMPLING_DEFAULTS[field]:
            raise sent(field).refused(f"{conflict} {sent('num_beams').name} > 1")


def _check_support(
    sampling: Sampling, set_fields: Collection[str], names: Mapping[str, NamedValue], context: ServerContext
) -> None:
    """Raise InvalidParameter if the engine does not support a value.

    Args:
        set_fields: the fields that the client or the dialect has set.
        names: the client's parameters, by the field that they set.
    """

    def refused(field: str, reason: str) -> InvalidParameter:
        sent = names.get(field) or NamedValue(field, getattr(sampling, field))
        return sent.refused(f"the engine {context.engine} {reason}")

    unheeded = () if sampling.do_sample else SAMPLED
    for field, reason in context.unsupported.items():
        if field not in set_fields or field in unheeded:
            continue
        value = getattr(sampling, field)
        # Every response contains the chosen token's log-probability, and a count of 1 requests only that.
        if value != SAMPLING_DEFAULTS[field] and not (field == "top_logprobs" and value <= 1):
            raise refused(field, f"does not support it: {reason}")

    for field, most in context.limits.items():
        if field not in unheeded and getattr(sampling, field) > most:
            raise refused(field, f"accepts at most {most:g}")


# -- schemas of requests, for the OpenAPI document ---------------------------------------------------------------------


def parameter(entry: Parameter, context: ServerContext) -> Shape:
    """Return the schema of a parameter, which may be null."""
    shape = for_engine(schema_of_reader(entry.read), entry.field, context)
    return nullable(shape) if shape else shape


def for_engine(shape: Mapping[str, Any], field: str, context: ServerContext) -> Shape:
    """Return the schema of a value for a field. Its description says if the engine does not support the field."""
    if reason := context.unsupported.get(field):
        return {**shape, "description": f"Refused: the engine {context.engine} does not support it: {reason}"}
    return dict(shape)


def parameters(table: Mapping[str, Parameter], context: ServerContext) -> dict[str, Shape]:
    return {name: parameter(entry, context) for name, entry in table.items()}


def request_shape(fields: Mapping[str, Shape], table: Table, *required: str) -> RequestShape:
    """Return a function that builds the schema of a body for a server.

    Args:
        fields: the schemas of fields that are not parameters, by name.
        table: the parameters of the body.
        required: the names of required fields and parameters.
    """

    def shape(context: ServerContext) -> Shape:
        properties = {**fields, **parameters(table.parameters, context)}
        needed = {
            name: schema_of_reader(table.parameters[name].read) if name in table.parameters else properties[name]
            for name in required
        }
        return record(needed, {name: item for name, item in properties.items() if name not in needed})

    return shape


def request_fields(readers: Mapping[str, Callable[[Any], Any]] = REQUEST_FIELDS) -> dict[str, Shape]:
    return {name: nullable(schema_of_reader(read)) for name, read in readers.items()}

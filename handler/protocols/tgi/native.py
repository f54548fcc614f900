"""TGI's own routes `/`, `/generate`, `/generate_stream`, `/tokenize` and `/chat_tokenize`, as in TGI 3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from handler.core.framing import JSON, KEEP_ALIVE, SSE
from handler.core.media import MEDIA
from handler.core.text import Prompt, spans
from handler.core.tgi_version import NEWEST, TgiVersion
from handler.core.values import Finish, Request, keep_last
from handler.protocols.assistant.template import READERS, read_template
from handler.protocols.assistant.tools.request import choose_format, lay_out, read_tools
from handler.protocols.kernel.body import report_unknown, unknown_parameters
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Description, Dialect, ParsedRequest, Timing, prompt_request
from handler.protocols.kernel.errors import Headers
from handler.protocols.kernel.messages import read_messages
from handler.protocols.kernel.parameters import (
    ANY,
    LMI,
    SAMPLING_DEFAULTS,
    UINT64,
    Parameter,
    Table,
    for_engine,
    read_all,
)
from handler.protocols.kernel.readers import NamedValue, integer, show, tgi_grammar
from handler.protocols.kernel.reply import SequenceOutput, list_parts
from handler.protocols.kernel.schema import Shape, nullable, record
from handler.protocols.lmi.request import EXAMPLE
from handler.protocols.lmi.response import DocumentReply, ResponseFormat, StreamReply, WholeOutput
from handler.protocols.openai.chat import continued
from handler.protocols.openai.request import CHAT, HARMLESS
from handler.protocols.tgi.api import (
    SLICE,
    OutOfRange,
    TgiAnswer,
    TgiDetails,
    TgiError,
    TgiErrors,
    TgiEvent,
    TgiList,
    TgiOthers,
    TgiOutput,
    TgiPiece,
    TgiSequence,
    WrongType,
)
from handler.protocols.tgi.response import TgiFormat, finish_shown, seed_of

# -- TGI's request: JSON types are checked as its library serde does, then ranges in TGI's order -----------------------
# Source: text-generation-inference 3, router/src/lib.rs and validation.rs. `mindie.py` uses the same functions.

MAX_BEST_OF, MAX_STOPS, MAX_TOP_TOKENS = 2, 4, 5
"""The default limits of TGI's launcher."""


class SerdeType(NamedTuple):
    """The JSON type of a field.

    Attributes:
        name: the name of the type in serde.
        fits: returns whether a value has the type.
        schema: the JSON schema of the field, including its range.
        null: whether null counts as absent.
        integral: whether an integer outside the range of the type is reported as a wrong value, not as a wrong type.
        items: the type of list items.
    """

    name: str
    fits: Callable[[Any], bool]
    schema: Mapping[str, Any]
    null: bool = True
    integral: bool = False
    items: SerdeType | None = None

    def within(self, **range: Any) -> SerdeType:
        """Return a copy of the type with a schema that includes the range of a parameter."""
        return self._replace(schema={**self.schema, **range})


def _integer(name: str, least: int, most: int) -> SerdeType:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return SerdeType(name, lambda value: type(value) is int and least <= value <= most, schema, integral=True)


_F32 = SerdeType("f32", lambda value: type(value) in (int, float), {"type": "number"})
_BOOL = SerdeType("a boolean", lambda value: isinstance(value, bool), {"type": "boolean"}, null=False)
_STRING = SerdeType("a string", lambda value: isinstance(value, str), {"type": "string"})
_USIZE = _integer("usize", 0, UINT64)
_U64 = _integer("u64", 0, UINT64)
_U32 = _integer("u32", 0, (1 << 32) - 1)
_I32 = _integer("i32", -(1 << 31), (1 << 31) - 1)
_STRINGS = SerdeType(
    "a sequence",
    lambda value: isinstance(value, list),
    {"type": "array", "items": _STRING.schema},
    null=False,
    items=_STRING,
)
_OBJECT = SerdeType("an object", lambda value: isinstance(value, dict), {"type": "object"}, null=False)
_POSITIVE = {"exclusiveMinimum": 0}
_OPEN = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}

PARAMETERS: Mapping[str, SerdeType] = {
    "best_of": _USIZE.within(maximum=MAX_BEST_OF),
    "temperature": _F32.within(**_POSITIVE),
    "repetition_penalty": _F32.within(**_POSITIVE),
    "frequency_penalty": _F32.within(minimum=-2, maximum=2),
    "top_k": _I32.within(**_POSITIVE),
    "top_p": _F32.within(**_OPEN),
    "typical_p": _F32.within(**_OPEN),
    "do_sample": _BOOL,
    "max_new_tokens": _U32.within(minimum=1),
    "return_full_text": _BOOL._replace(null=True),
    "stop": _STRINGS.within(maxItems=MAX_STOPS),
    "truncate": _USIZE.within(minimum=1),
    "watermark": _BOOL,
    "details": _BOOL,
    "decoder_input_details": _BOOL,
    "seed": _U64,
    "top_n_tokens": _U32.within(maximum=MAX_TOP_TOKENS),
    "grammar": _OBJECT._replace(null=True),
    "adapter_id": _STRING,
}

TOP_LEVEL: Mapping[str, SerdeType] = {"inputs": _STRING._replace(null=False), "parameters": _OBJECT, "stream": _BOOL}


class Body(NamedTuple):
    """A body whose types have been checked and whose null fields have been removed.

    Attributes:
        has_parameters: whether the body has `parameters`. Without `parameters`, TGI samples by default.
    """

    inputs: str
    parameters: Mapping[str, Any]
    has_parameters: bool
    stream: bool


def read_body(
    body: Any, top_level: Mapping[str, SerdeType] = TOP_LEVEL, parameters: Mapping[str, SerdeType] = PARAMETERS
) -> Body:
    """Check the types of the body fields and return the body.

    Raises:
        WrongType: a field has a wrong type, or `inputs` is missing. The message names the first such field.
    """
    _check("the body", body, _OBJECT)
    fields = _read_fields(body, top_level, "")
    if "inputs" not in fields:
        raise WrongType("missing field `inputs`")
    params = fields.get("parameters")
    typed = {} if params is None else _read_fields(params, parameters, "parameters.")
    return Body(fields["inputs"], typed, params is not None, bool(fields.get("stream")))


def _read_fields(values: Mapping[str, Any], kinds: Mapping[str, SerdeType], prefix: str) -> dict[str, Any]:
    fields = {}
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None or (value is None and kind.null):
            continue
        _check(f"{prefix}{name}", value, kind)
        fields[name] = value
    return fields


def _check(where: str, value: Any, kind: SerdeType) -> None:
    if not kind.fits(value):
        raise WrongType(f"{where}: {_describe(value, kind)}, expected {kind.name}")
    if kind.items is not None:
        for index, item in enumerate(value):
            _check(f"{where}[{index}]", item, kind.items)


def _describe(value: Any, kind: SerdeType) -> str:
    """Describe an unexpected value as serde does."""
    match value:
        case None:
            return "invalid type: null"
        case bool():
            return f"invalid type: boolean `{show(value)}`"
        case int():
            return f"invalid {'value' if kind.integral else 'type'}: integer `{show(value)}`"
        case float():
            return f"invalid type: floating point `{show(value)}`"
        case str():
            return f"invalid type: string {show(value)}"
        case list():
            return "invalid type: sequence"
    return "invalid type: map"


def unknown(body: Mapping[str, Any], context: ServerContext, kinds: Mapping[str, SerdeType] = PARAMETERS) -> list[str]:
    """List the unknown fields of the body."""
    return report_unknown(body, TOP_LEVEL, context, unknown_parameters(body.get("parameters") or {}, kinds))


# -- limits ------------------------------------------------------------------------------------------------------


def require(right: bool, otherwise: str) -> None:
    if not right:
        raise OutOfRange(otherwise)


def check_limits(body: Body, context: ServerContext, *, stream: bool, of_launcher: bool = True) -> None:
    """Check the ranges of the body fields in the same order as TGI.

    Args:
        of_launcher: whether the default limits of TGI's launcher apply, which its operator may have raised.

    Raises:
        OutOfRange: a value is out of range. The message is the same as in TGI.
    """
    params = body.parameters
    best_of, do_sample = params.get("best_of", 1), params.get("do_sample", not body.has_parameters)
    if stream:
        require(best_of == 1, "`best_of` != 1 is not supported when streaming tokens")
        no_prefill = not params.get("decoder_input_details")
        require(no_prefill, "`decoder_input_details` == true is not supported when streaming tokens")
    require(not of_launcher or best_of <= MAX_BEST_OF, f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}")
    sampled = do_sample or not params.keys().isdisjoint(("temperature", "top_k", "top_p", "typical_p"))
    require(best_of <= 1 or sampled, "you must use sampling when `best_of` is > 1")
    check_sampling(params)
    require(params.get("max_new_tokens") != 0, "`max_new_tokens` must be strictly positive")
    num_stops = len(params.get("stop", ()))
    require(
        not of_launcher or num_stops <= MAX_STOPS,
        f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {num_stops}",
    )
    require(best_of <= 1 or "seed" not in params, "`seed` must not be set when `best_of` > 1")
    top = params.get("top_n_tokens", 0)
    require(
        not of_launcher or top <= MAX_TOP_TOKENS, f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_TOKENS}. Given: {top}"
    )
    require(body.inputs != "", "`inputs` cannot be empty")
    check_truncate(params, context)
    if "grammar" in params:
        try:
            tgi_grammar(params["grammar"])
        except ValueError as error:
            raise OutOfRange(f"grammar is not valid: it {error}") from None


def check_sampling(params: Mapping[str, Any]) -> None:
    """Check the ranges that TGI and MindIE have in common, in the same order as TGI."""
    for name in ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p", "top_k"):
        match PARAMETERS[name].schema:
            case {"exclusiveMinimum": least, "exclusiveMaximum": most}:
                require(least < params.get(name, 0.5) < most, f"`{name}` must be > {least:.1f} and < {most:.1f}")
            case {"exclusiveMinimum": least}:
                require(params.get(name, 1) > least, f"`{name}` must be strictly positive")
            case {"minimum": least, "maximum": most}:
                require(least <= params.get(name, 0) <= most, f"`{name}` must be >= {least:.1f} and <= {most:.1f}")


def check_truncate(params: Mapping[str, Any], context: ServerContext) -> None:
    """Check that `truncate` leaves room for one new token."""
    truncate, total = params.get("truncate", 1), context.most_tokens()
    most = (1 << 32) if total is None else total - 1
    text = "`truncate` must be strictly positive and less than"
    require(0 < truncate <= most, f"{text} {most}. Given: {truncate}")


def table_of(names: Collection[str]) -> Table:
    """Return the parameters of TGI or MindIE, which are read as in LMI after the checks that TGI performs."""
    parameters = {name: parameter for name, parameter in LMI.parameters.items() if name in names}
    max_new_tokens = Parameter("max_new_tokens", integer(1, (1 << 32) - 1))
    return Table({**parameters, "max_new_tokens": max_new_tokens}, LMI.prefix)


TABLE = table_of(PARAMETERS)

TGI_DEFAULTS = {"include_stop": True, "skip_special_tokens": False}
"""TGI's defaults. Special tokens appear in lists of tokens and can match stop strings, but not in the whole text."""


_SHAPING = ("temperature", "top_k", "top_p", "typical_p")


class Document(DocumentReply):
    """A non-streaming response. `best_of` selects the sequence with the highest mean log-probability."""

    def _score(self, sequence: SequenceOutput) -> float:
        return sequence.mean_logprob

    def has_begun(self) -> bool:
        return any(sequence.tokens for sequence in self._sequences)


def _shapes(kinds: Mapping[str, SerdeType], context: ServerContext) -> dict[str, Shape]:
    shapes = {}
    for name, kind in kinds.items():
        parameter = LMI.parameters.get(name)
        shape = for_engine(kind.schema, parameter.field if parameter else name, context)
        shapes[name] = nullable(shape) if kind.null else shape
    return shapes


def body_shape(
    top_level: Mapping[str, SerdeType], kinds: Mapping[str, SerdeType], context: ServerContext, **inputs: int
) -> Shape:
    """Return the schema of a body.

    Args:
        inputs: additional keywords of the schema of `inputs`, such as `maxLength`.
    """
    fields = _shapes(top_level, context)
    text = {**fields.pop("inputs"), "minLength": 1, **inputs}
    return record(
        {"inputs": text}, {**fields, "parameters": {**fields["parameters"], "properties": _shapes(kinds, context)}}
    )


_DESCRIPTION = Description(
    title="TGI",
    request="TgiGenerateRequest",
    request_shape=partial(body_shape, TOP_LEVEL, PARAMETERS),
    error=TgiError,
    example=EXAMPLE,
)


class Tgi(TgiFormat, Dialect):
    """The dialect of a TGI route that generates text.

    Args:
        array: whether a non-streaming response is wrapped in an array.
        streams: whether the route streams. If it is None, `stream` in the body decides.
        full_text: whether the text begins with the prompt by default.
        version: the release of TGI whose defaults and limit of new tokens apply, without the limits that its operator
            may set. None means the last release, with its default limits.
    """

    special_in_text = False
    unique_keys = True
    response_headers = (
        "x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time",
        "x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens",
    )  # fmt: skip

    errors: TgiErrors

    def __init__(
        self,
        name: str,
        *,
        array: bool = False,
        streams: bool | None = None,
        full_text: bool = False,
        version: TgiVersion | None = None,
    ) -> None:
        self.name = name
        self._of_launcher = version is None
        version = version or NEWEST
        self._max_new_tokens, self._samples_alone = version.max_new_tokens, version.samples_alone
        self._min_free_tokens = SLICE if version >= (3, 0) else None
        self.array = array
        self._streams = streams
        self._full_text = full_text
        self.errors = TgiErrors(streams=bool(streams))
        whole = TgiList if array else TgiAnswer
        self.description = _DESCRIPTION._replace(
            response=None if streams else whole,
            chunk=None if streams is False else TgiEvent,
            streams=() if streams is False else (SSE.content_type,),
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        read = read_body(body)
        if not self._samples_alone:
            read = read._replace(has_parameters=True)
        stream = read.stream if self._streams is None else self._streams
        check_limits(read, context, stream=stream, of_launcher=self._of_launcher)
        params, lacking = _sampling_inferred(read, context)
        request = self._request(read, params, context)
        ignored = [*unknown(body, context), *lacking]
        if read.stream and not stream:
            ignored.append("stream")  # this route does not read it
        parsed = parsed_request(self, partial(TgiErrors, streams=stream), request, ignored, streams=stream)
        return parsed._replace(headers=headers(request, context), keep_alive=KEEP_ALIVE if stream else b"")

    def errors_of(self, body: Any, context: ServerContext) -> TgiErrors:
        if self._streams is None and isinstance(body, dict) and body.get("stream") is True:
            return TgiErrors(streams=True)
        return self.errors

    def _request(self, read: Body, params: Mapping[str, Any], context: ServerContext) -> Request:
        defaults = {**TGI_DEFAULTS, "max_new_tokens": self._max_new_tokens or ANY}
        parameters = read_all(params, context, defaults=defaults, table=TABLE)
        sampling = parameters.sampling
        details = params.get("details", False) or sampling.prompt_logprobs
        return Request(
            prompt=read.inputs,
            sampling=context.with_seed(sampling) if details else sampling,
            truncation=keep_last(params.get("truncate")),
            details=details,
            full_text=params.get("return_full_text", self._full_text),
            adapter=parameters.others.get("adapter"),
            fill_context="max_new_tokens" not in params and self._max_new_tokens is None,
            min_free_tokens=self._min_free_tokens,
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, finish: Finish, num_tokens: int) -> str:
        return finish_shown(request, finish, num_tokens).value

    def _details(self, output: WholeOutput) -> TgiDetails:
        request, best, others, _ = output
        details = self._sequence(request, best)
        more: TgiOthers = {"best_of_sequences": [self._other(request, other) for other in others]} if others else {}
        return {**details, **more, **self._tops(request, best)}

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
        text = request.text_before + other.text
        return {"generated_text": text, **self._sequence(request, other), **self._tops(request, other)}


def parsed_request(
    format: ResponseFormat, errors: Callable[..., TgiErrors], request: Request, ignored: Sequence[str], *, streams: bool
) -> ParsedRequest:
    """Return a parsed request with its reply and its error format.

    Args:
        errors: creates the error format from the arguments `request` and `has_begun` of `TgiErrors`.
    """
    if streams:
        framed = errors(request=request)
        return ParsedRequest((request,), StreamReply(format, request, SSE, framed), framed, ignored, streams=True)
    document = Document(format, request)
    return ParsedRequest((request,), document, errors(request=request, has_begun=document.has_begun), ignored)


def _sampling_inferred(read: Body, context: ServerContext) -> tuple[dict[str, Any], list[str]]:
    """Set `do_sample` as TGI's shards do: any parameter that shapes the probability distribution enables sampling.

    This applies even if `do_sample` is false, because LangChain sends false together with `typical_p`. If the client
    does not explicitly request sampling, shaping parameters that the engine does not support are removed.

    Returns:
        The parameters, and the names of the removed parameters.
    """
    params = {name: value for name, value in read.parameters.items() if (name, value) != ("best_of", 0)}
    sampled = params.get("do_sample", not read.has_parameters) or params.get("best_of", 1) > 1
    shapes = [] if sampled else [name for name in _SHAPING if params.get(name) not in (None, SAMPLING_DEFAULTS[name])]
    lacking = [name for name in shapes if name in context.unsupported]
    for name in lacking:
        del params[name]
    params["do_sample"] = sampled or len(shapes) > len(lacking)
    return params, [f"parameters.{name}" for name in lacking]


def headers(request: Request, context: ServerContext) -> Callable[[Timing | None], Headers]:
    """Return a function that builds TGI's headers. Times are in whole milliseconds, but `x-compute-time` in seconds."""
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


# -- TGI's /tokenize and /chat_tokenize: the tokens of a prompt with their positions in its text -----------------------


_TOKENIZE_SHAPING = ("add_special_tokens", "chat_template", *READERS)
"""Parameters that change the prompt of a chat, as on /v1/chat/completions."""

_NO_EFFECT = HARMLESS | {"model", "stream", "stream_options", "tool_choice", "parallel_tool_calls"}
_NO_EFFECT |= CHAT.parameters.keys() - {*_TOKENIZE_SHAPING, "truncate_prompt_tokens"}
"""Fields that do not affect the prompt of a chat."""


class _TgiTokenize(Dialect):
    """The dialect of /tokenize. It accepts the bodies of /generate, but reads only `inputs`, as TGI does."""

    name = "tgi_tokenize"
    computes = False
    unique_keys = True
    errors = TgiErrors()

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        inputs = read_body(body).inputs
        if not inputs:
            raise OutOfRange("`inputs` cannot be empty")
        return prompt_request(Request(inputs), _tokens, self.errors, unknown(body, context))


class _TgiChatTokenize(_TgiTokenize):
    """The dialect of /chat_tokenize. The prompt of a chat is the same as on /v1/chat/completions, including tools."""

    name = "tgi_chat_tokenize"
    computes = True  # TGI counts these requests

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict) or "messages" not in body:
            raise WrongType("missing field `messages`")
        tools = read_tools(body, context)
        text_only = replace(context, no_media=dict.fromkeys(MEDIA, "this route renders text only"))
        body, (messages, _, names) = continued(body, read_messages(body["messages"], text_only))
        params = {name: item for name, item in body.items() if item is not None and name not in ("messages", "tools")}
        shaping = [NamedValue(name, params.pop(name)) for name in _TOKENIZE_SHAPING if name in params]
        options = {option.name: option.read(CHAT.parameters[option.name].read) for option in shaping}
        template, unread = read_template(options, messages, context)
        names = [*names, *tools.unknown, *unread, *(name for name in params if name not in _NO_EFFECT)]
        ignored = report_unknown(body, body, context, names, generates=False)
        messages, prompt_tools = lay_out(messages, tools.shown, context.chat_template, choose_format(context))
        request = Request("", messages=messages, tools=prompt_tools, template=template)
        return prompt_request(request, _chat_tokens, self.errors, ignored)


TOKENIZE, CHAT_TOKENIZE = _TgiTokenize(), _TgiChatTokenize()


def _chat_tokens(prompt: Prompt) -> Iterator[bytes]:
    """Yield the parts of the JSON response of /chat_tokenize."""
    yield b'{"tokenize_response":'
    yield from _tokens(prompt)
    yield b',"templated_text":' + JSON.encode(prompt.text) + b"}"


def _tokens(prompt: Prompt) -> Iterator[bytes]:
    """Yield the parts of a JSON list of tokens, each with its range of bytes in the prompt.

    If the ranges are unknown, tokens have no text and the range (0, 0).
    """
    data = prompt.text.encode()
    places = zip(prompt.ids, spans(prompt) or [(0, 0)] * len(prompt.ids), strict=True)
    pieces: Iterator[TgiPiece] = (
        {"id": id, "text": data[start:stop].decode(), "start": start, "stop": stop} for id, (start, stop) in places
    )
    return list_parts(pieces)

"""OpenAI's conventions, shared by several dialects: the parsing of bodies, and responses that consist of choices."""

from __future__ import annotations

import functools
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from handler.core.errors import InvalidParameter, InvalidPayload, ModelNotFound
from handler.core.framing import JSON, JSON_TEXTS, KEEP_ALIVE, NUMBER, SLOT, SSE_DONE, Framing, template
from handler.core.values import Adapter, Delta, FieldNames, Finish, Request, StructuredOutput, Token, new_digits
from handler.protocols.assistant.template import READERS as TEMPLATE_READERS
from handler.protocols.kernel.body import PYDANTIC, relaxed_by, report_unknown
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, ServerContext
from handler.protocols.kernel.dialect import Dialect, ParsedRequest
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import (
    MAX_TOP_TOKENS,
    PARAMETERS,
    Parameter,
    ParsedParameters,
    Table,
    dialect_parameters,
    unsupported,
)
from handler.protocols.kernel.readers import (
    MAX_NAME,
    NamedValue,
    boolean,
    choice,
    grammar,
    integer,
    json_object,
    json_schema,
    merge_adapters,
    only,
    regex,
    response_format,
    show,
    tgi_grammar,
)
from handler.protocols.kernel.reply import Reply, SequenceOutput, TokenStream, WholeReply
from handler.protocols.kernel.schema import FLAG, NULL, TEXT, Shape, accepts, nullable, schema_of_reader
from handler.protocols.kernel.texts import most_tokens
from handler.protocols.openai.api import ERRORS, ResponseFields, StreamUsage, TokenUsage
from handler.protocols.openai.unsupported import FOREIGN, OF_CHATS, OF_COMPLETIONS, OF_VLLM

REASONS: Mapping[Finish | None, str | None] = {
    None: None,
    Finish.EOS: "stop",
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ERROR: "stop",
}


class OpenAiHead(NamedTuple):
    """The fields that are the same in all chunks of a response."""

    id: str
    created: int
    model: str = ""
    fingerprint: str = ""

    def value(self, kind: str) -> ResponseFields:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def stop_reason(finish: Finish | None, stop: str | None, last_id: int) -> str | int | None:
    """Return vLLM's `stop_reason`: the stop string or stop token id that ended a response, or None.

    Args:
        stop: the stop string, or None if a token ended the response.
        last_id: the id of the last token, or -1 if there is none.
    """
    if finish is not Finish.STOP:
        return None
    return stop or (last_id if last_id >= 0 else None)


def identity(prefix: str) -> tuple[str, int]:
    """Return a new id for a response, and the current time in seconds since 1970."""
    return f"{prefix}-{new_digits()}", int(time.time())


class Usage(NamedTuple):
    """The settings for the token counts in a stream (`stream_options`).

    Attributes:
        at_end: whether to report token counts in a last chunk.
        always: whether to report token counts in every chunk.
        null: whether chunks without counts have `"usage": null`, as TGI's chats always do.
    """

    at_end: bool = False
    always: bool = False
    null: bool = False


def usage(
    num_prompt_tokens: int, num_tokens: int, num_reasoning: int | None = None, num_cached_tokens: int = 0
) -> TokenUsage:
    """Return the token counts of a response.

    Args:
        num_reasoning: the number of reasoning tokens, or None if reasoning is not separated from the text.
        num_cached_tokens: the number of prompt tokens in the engine's cache, or 0 if the engine does not report it.
    """
    counts: TokenUsage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    if num_reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    if num_cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    return counts


_COUNTS: TokenUsage = {"prompt_tokens": NUMBER, "completion_tokens": NUMBER, "total_tokens": NUMBER}


class Choice:
    """The state of one choice in a stream.

    `text_event` is the template of chunks in which only the text changes. If chunks also contain token counts, it is
    only the template of the element of `choices`. It is None before the first chunk, and if other fields also change.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.stop: str | None = None  # the stop string that ended the choice
        self.text_event: bytes | None = None


C = TypeVar("C", bound=Choice)


class Stream(TokenStream, Generic[C]):
    """A stream with one chunk per token, followed by a chunk with token counts if requested, and `[DONE]`.

    Subclasses render a choice's part of a chunk.

    Args:
        choices: the choices of the first request, then the choices of the second request, and so on.

    Attributes:
        kind: the `object` of a chunk.
    """

    kind: str

    def __init__(
        self,
        head: OpenAiHead,
        choices: Sequence[C],
        usage: Usage,
        num_requests: int = 1,
        framing: Framing = SSE_DONE,
        errors: ErrorFormat = ERRORS,
    ) -> None:
        super().__init__(errors, framing, num_requests, len(choices) // num_requests)
        self._fields = head
        self._choices = choices
        self._usage = usage
        counts: StreamUsage = {"usage": _COUNTS if usage.always else None} if usage.always or usage.null else {}
        self._event = template(framing.encode(self._value([SLOT], counts)))
        self._is_text = not usage.always  # True if `Choice.text_event` is a whole chunk

    def _take(self, position: int, delta: Delta) -> None:
        super()._take(position, delta)
        self._choices[position].stop = delta.extras and delta.extras.stop

    def _token(self, position: int, token: Token) -> bytes:
        choice = self._choices[position]
        if choice.text_event is not None:
            return self._text_chunk(choice.text_event, token.text)
        return self._begin(choice, position, token)

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        part = self._part(self._choices[position], token, finish)
        return b"" if part is None else self._chunk(JSON.encode(part))

    def _begin(self, choice: C, position: int, token: Token) -> bytes:
        """Encode the first chunk of a choice. Set its template if later chunks differ only in their text."""
        part = self._part(choice, token, None)
        if part is None:
            return b""
        choice.begun = True
        if self._is_plain:
            text_part = JSON.encode(self._text_part(choice, SLOT))
            choice.text_event = template(text_part if self._usage.always else self._chunk(text_part))
            self._events[position] = choice.text_event if self._is_text else None
        return self._chunk(JSON.encode(part))

    def _text_chunk(self, event: bytes, text: str) -> bytes:
        data = event % JSON_TEXTS[text]
        return self._chunk(data) if self._usage.always else data

    def _value(self, choices: list[Any], counts: StreamUsage) -> Mapping[str, object]:
        """Return the value of a chunk with these choices and token counts."""
        return {**self._fields.value(self.kind), "choices": choices, **counts}

    @property
    def _is_plain(self) -> bool:
        """Return whether all chunks with text differ only in the text."""
        raise NotImplementedError

    def _text_part(self, choice: C, text: str) -> Mapping[str, Any]:
        """Return the choice's part of a chunk that contains only text."""
        raise NotImplementedError

    def _part(self, choice: C, token: Token, finish: Finish | None) -> Mapping[str, Any] | None:
        """Return a choice's part of a chunk, or None if there is nothing to send yet.

        Args:
            finish: the reason why the choice ends with this token, or None if it continues.
        """
        raise NotImplementedError

    def _chunk(self, part: bytes) -> bytes:
        """Insert a choice's encoded part into the template of a chunk."""
        if not self._usage.always:
            return self._event % part
        num_prompt_tokens, num_tokens = self._num_prompt_tokens, self._num_tokens
        return self._event % (part, num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens)

    def _end(self) -> bytes:
        chunk = b""
        if self._usage.at_end:
            counts = usage(self._num_prompt_tokens, self._num_tokens, self._count_reasoning(), self._num_cached_tokens)
            chunk = self._framing.encode(self._value([], {"usage": counts}))
        return chunk + self._framing.end

    def _count_reasoning(self) -> int | None:
        """Return the number of reasoning tokens, or None if reasoning is not separated from the text."""
        return None


class WholeResponse(WholeReply):
    """A non-streaming response as a single object, which subclasses render.

    Args:
        num_sequences: the number of sequences of each request.
    """

    def __init__(self, head: OpenAiHead, num_requests: int, num_sequences: int, framing: Framing = JSON) -> None:
        super().__init__(num_requests * num_sequences, framing=framing)
        self._head = head
        self._each = num_sequences

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        return self._sequences[index * self._each + delta.sequence]

    def _usage(self, num_reasoning: int | None = None) -> TokenUsage:
        """Return the token counts. `num_reasoning` is None if reasoning is not separated from the text."""
        num_tokens = sum(sequence.num_tokens for sequence in self._sequences)
        num_cached_tokens = sum(first.extras.num_cached_tokens or 0 for first in self._sequences[:: self._each])
        return usage(self._num_prompt_tokens, num_tokens, num_reasoning, num_cached_tokens)


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def top_logprobs(value: Any, context: ServerContext) -> int:
    """Read the number of alternatives. If the engine reports none, 1 means only the chosen token, as in LMI."""
    count = integer(0, MAX_TOP_TOKENS)(value)
    return 0 if count == 1 and "top_logprobs" in context.unsupported else count


@accepts(type="object", required=["type"], properties={"type": {"type": "string"}})
def _format(value: Any) -> StructuredOutput | None:
    """Read `response_format` in OpenAI's format, or in TGI's format with `value`, which huggingface_hub sends."""
    return tgi_grammar(value) if isinstance(value, dict) and "value" in value else response_format(value)


_STRUCTURED_OUTPUT_READERS = {
    "json": json_schema,
    "regex": regex,
    "choice": choice,
    "grammar": grammar,
    "json_object": json_object,
}


@accepts(type="object", properties={name: {} for name in _STRUCTURED_OUTPUT_READERS})
def structured_outputs(value: Any) -> StructuredOutput | None:
    """Read vLLM's `structured_outputs`, an object with exactly one field that is neither null nor false."""
    expected = f"must be an object with exactly one of {', '.join(_STRUCTURED_OUTPUT_READERS)}"
    items = value.items() if isinstance(value, dict) else ()
    constraints = {name: item for name, item in items if item is not None and item is not False}
    only(constraints, *_STRUCTURED_OUTPUT_READERS)
    if len(constraints) != 1:
        raise ValueError(expected)
    ((name, item),) = constraints.items()
    return _STRUCTURED_OUTPUT_READERS[name](item)


@accepts(type="integer", minimum=-1)
def _budget(value: Any) -> int | None:
    """Read vLLM's `thinking_token_budget` (vllm/sampling_params.py). Return None for -1, which means no limit."""
    budget = integer(-1)(value)
    return budget if budget >= 0 else None


@accepts(type="string", description="llama-server's grammar in GBNF")
def _gbnf(value: Any) -> StructuredOutput | None:
    """Read llama-server's `grammar`, whose default is an empty string."""
    if isinstance(value, dict):
        raise ValueError("must be a grammar in GBNF; send TGI's grammars as response_format")
    return grammar(value) if value != "" else None


_OF_VLLM: Mapping[str, Parameter] = {
    "truncate_prompt_tokens": Parameter("truncate", most_tokens, informed=True),
    "truncation_side": unsupported("a prompt always keeps its end", "left"),
    "structured_outputs": Parameter("structured_output", structured_outputs),
    **OF_VLLM,
}
"""Parameters of vLLM's requests (vllm/entrypoints/openai/*/protocol.py, 0.33)."""

_OF_SGLANG: Mapping[str, Parameter] = {
    "regex": PARAMETERS["guided_regex"],
    "ebnf": PARAMETERS["guided_grammar"],
    "json_schema": PARAMETERS["guided_json"],
    "no_stop_trim": PARAMETERS["include_stop_str_in_output"],
}
"""SGLang's names of parameters that others have too (sglang/srt/entrypoints/openai/protocol.py). llama-server has
`json_schema` too.
"""

_BOTH = {
    **dialect_parameters("openai"),
    "logprobs": Parameter("", boolean),
    "top_logprobs": Parameter("top_logprobs", top_logprobs, informed=True),
    "response_format": Parameter("structured_output", _format),
    **_OF_VLLM,
    **_OF_SGLANG,
    "grammar": Parameter("structured_output", _gbnf),
    **FOREIGN,
}

CHAT = Table(
    {
        **_BOTH,
        "max_completion_tokens": PARAMETERS["max_new_tokens"],
        **OF_CHATS,
        **{name: Parameter(name, read) for name, read in TEMPLATE_READERS.items()},
        "include_reasoning": Parameter("include_reasoning", boolean),
        "thinking_token_budget": Parameter("thinking_token_budget", _budget),
        "return_prompt_text": unsupported("use /tokenize with return_token_strs", False),
    }
)

COMPLETIONS = Table(
    {
        **{name: parameter for name, parameter in _BOTH.items() if name != "top_logprobs"},
        "max_tokens": Parameter("max_new_tokens", integer(0)),
        "logprobs": Parameter("top_logprobs", top_logprobs, informed=True),
        "best_of": PARAMETERS["best_of"],
        "echo": Parameter("echo", boolean),
        "return_token_ids": Parameter("return_token_ids", boolean),
        **OF_COMPLETIONS,
    }
)

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "reasoning_effort", "verbosity", "request_id", "guided_decoding_backend",
        "tool_prompt", "session_id", "stream_interval", "return_token_offsets", "mm_payload", "return_mm_kwargs",
        "routed_experts_prompt_start",
    }
)  # fmt: skip
"""Fields of OpenAI, vLLM or TGI clients that have no effect. They are reported as ignored, but not refused."""

_UNNAMED = ("tgi", "dummy")  # names of models that TGI's clients send by default
_ADDRESS = re.compile("https?://[^/]", re.IGNORECASE)
"""Matches a server address, which @huggingface/inference sends as the model if its caller sets no model."""


MODEL: Mapping[str, Shape] = {
    "model": {
        **nullable(TEXT),
        "description": "The name of the model or of an adapter. An empty string or an HTTP address means the model",
    }
}
"""The schema of the field that `read_model` reads."""


def read_model(
    body: Mapping[str, Any],
    context: ServerContext,
    request_context: RequestContext,
    own: str = "",
    adapter: Adapter | None = None,
) -> tuple[str, Adapter | None]:
    """Read `model`. Return the model name for the response, and the adapter that the request names, if any.

    Args:
        own: the model name in responses if the body has no `model`, or "" for `context.own_name`.
        adapter: the adapter named in another field, or None for the adapter named in a header.

    Raises:
        ModelNotFound: neither the model nor an adapter has this name.
        InvalidPayload: `model` names a different adapter than another field or a header.
    """
    own = own or context.own_name
    names = (own, *context.model_names)
    name = _read_name(body)
    if adapter := adapter or request_context.adapter:
        return adapter.name, merge_adapters(adapter, _find(name, context), "model")
    if not name:
        return own, None
    if name in _UNNAMED or name in names:
        return name, None
    if _ADDRESS.match(name):
        return own, None
    adapter = _find(name, context)
    if adapter is None and "*" not in names:
        raise ModelNotFound(name, served=(*names, *context.adapters.names()))
    return name, adapter


def _read_name(body: Mapping[str, Any]) -> str:
    """Return the value of `model`, or "" if it is absent."""
    name = "" if body.get("model") is None else body["model"]
    if not isinstance(name, str):
        raise InvalidParameter("model: must be a string")
    if len(name) > MAX_NAME:  # each chunk repeats it
        raise InvalidParameter(f"model: has {len(name)} characters; the maximum is {MAX_NAME}")
    return name


def _find(name: str, context: ServerContext) -> Adapter | None:
    return None if context.no_adapters else context.adapters.find(name)


_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""The known fields of `stream_options`. `include_obfuscation` has no effect, because chunks are never padded."""


OPENAI_NAMES = FieldNames(
    prompt="messages", stop_token_ids="stop_token_ids", bad_token_ids="bad_words", logit_bias="logit_bias"
)


def names(fields: FieldNames, parameters: ParsedParameters) -> FieldNames:
    """Return the client's names for fields, for use in the errors of later checks.

    Args:
        fields: the names that do not depend on the request.
    """
    ruled = parameters.sampling.structured_output is not None  # if no field requests it, the tools do
    structured_output = parameters.names.get("structured_output", "tools" if ruled else "response_format")
    if structured_output == "tool_choice":
        structured_output = "tools"
    return fields._replace(
        max_new_tokens=parameters.names.get("max_new_tokens", "max_tokens"), structured_output=structured_output
    )


def read_stream(body: Mapping[str, Any], context: ServerContext) -> tuple[bool, Usage]:
    """Read `stream` and `stream_options`. Return whether to stream, and the settings for token counts."""
    stream, options = bool(NamedValue("stream", body.get("stream")).optional(boolean)), body.get("stream_options")
    force = context.config.enable_force_include_usage
    if options is None:
        return stream, read_usage({}, force=force)
    if not stream:
        raise InvalidParameter(f"stream_options={show(options)}: needs stream=true")
    return True, NamedValue("stream_options", options).read(functools.partial(read_usage, force=force))


@accepts(
    type="object",
    properties={name: {"type": ["boolean", "null"]} for name in _STREAM_OPTIONS},
    additionalProperties=NULL,
)
def read_usage(options: Any, *, force: bool = False) -> Usage:
    """Read `stream_options`.

    Args:
        force: whether to report token counts in every chunk and at the end regardless of the options, as in vLLM.
    """
    if not isinstance(options, dict):
        raise ValueError("must be an object")
    only(options, *_STREAM_OPTIONS)
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name!r} must be true or false")
    at_end = force or bool(options.get("include_usage"))
    return Usage(at_end, force or (at_end and bool(options.get("continuous_usage_stats"))), null=at_end)


STREAM: Mapping[str, Shape] = {"stream": nullable(FLAG), "stream_options": nullable(schema_of_reader(read_usage))}
"""The schemas of the fields that `read_stream` reads."""


def streaming(
    requests: tuple[Request, ...],
    reply: Reply,
    errors: ErrorFormat,
    ignored: Sequence[str],
    framing: Framing = SSE_DONE,
) -> ParsedRequest:
    """Return a parsed request with a streamed response. In server-sent events, comments keep idle connections open."""
    keep_alive = KEEP_ALIVE if framing.content_type == SSE_DONE.content_type else b""
    return ParsedRequest(requests, reply, errors, ignored, streams=True, keep_alive=keep_alive)


class OpenAiDialect(Dialect):
    """Base class of dialects that follow OpenAI's conventions. All fields are at the top level, and types are converted
    as in vLLM.

    Attributes:
        table: the fields that set parameters.
        fields: the other fields that are read, with their schemas.
        needed: a description of a valid body for error messages.
        harmless: the fields that are reported as ignored; by default, the unread fields of `HARMLESS`.
        accepted: other fields that are neither refused nor reported as ignored.
        generates: whether requests reach the engine, so that isolation and constraints matter.
    """

    errors: ErrorFormat = ERRORS
    table: Table
    fields: Mapping[str, Shape]
    needed: str
    harmless: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()
    generates = True

    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload(f"the body must be {self.needed}")
        return self.read(self._relax()(body), context, request_context)

    @abstractmethod
    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        """Parse a body whose numbers and flags have been converted to their types."""

    def read_model(
        self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext
    ) -> tuple[str, Adapter | None]:
        """Return the model name for the response, and the LoRA adapter that the request names, if any."""
        return read_model(body, context, request_context)

    def ignored(self, body: Mapping[str, Any], context: ServerContext, *unknown: str) -> list[str]:
        """List the fields that have no effect: unknown and harmless fields of the body, and the names in `unknown`."""
        return [*self.unknown(body, context, *unknown), *self.no_effect(body)]

    def unknown(self, body: Mapping[str, Any], context: ServerContext, *paths: str) -> list[str]:
        """List the unknown fields of the body, followed by `paths`. Null fields count as absent."""
        return report_unknown(body, self._not_reported(), context, paths, generates=self.generates)

    def no_effect(self, body: Mapping[str, Any]) -> list[str]:
        """List the harmless fields of the body. Null fields count as absent."""
        harmless = self._harmless()
        return [name for name, value in body.items() if value is not None and name in harmless]

    @classmethod
    @functools.cache
    def _known(cls) -> frozenset[str]:
        return cls.accepted | cls.fields.keys() | cls.table.parameters.keys()

    @classmethod
    @functools.cache
    def _harmless(cls) -> frozenset[str]:
        return cls.harmless or HARMLESS - cls._known()

    @classmethod
    @functools.cache
    def _not_reported(cls) -> frozenset[str]:
        return cls._known() | cls._harmless()

    @classmethod
    @functools.cache
    def _relax(cls) -> Callable[[Any], Any]:
        return relaxed_by(PYDANTIC, {**cls.fields, **cls.table.shapes})

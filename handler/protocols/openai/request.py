"""OpenAI's conventions, which several dialects share: reading bodies; chunks and documents of choices."""

from __future__ import annotations

import functools
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from handler.core.errors import InvalidParameter, InvalidPayload, ModelNotFound
from handler.core.framing import JSON, JSON_TEXTS, KEEP_ALIVE, NUMBER, SLOT, SSE_DONE, Framing, template
from handler.core.media import new_digits
from handler.core.values import Adapter, Delta, FieldNames, Finish, Request, StructuredOutput, Token
from handler.protocols.assistant.template import READERS as TEMPLATE_READERS
from handler.protocols.kernel.body import PYDANTIC, relaxed_by, report_unknown
from handler.protocols.kernel.dialect import Dialect, ParsedRequest, Reply, ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.parameters import (
    MAX_TOP_TOKENS,
    PARAMETERS,
    Parameter,
    ParsedParameters,
    Table,
    named,
    unsupported,
)
from handler.protocols.kernel.readers import (
    MAX_NAME,
    Named,
    boolean,
    choice,
    grammar,
    integer,
    json_object,
    json_schema,
    merge_adapters,
    number,
    regex,
    response_format,
    show,
    string,
    tgi_grammar,
)
from handler.protocols.kernel.reply import SequenceOutput, TokenStream, WholeReply
from handler.protocols.kernel.schema import FLAG, TEXT, Shape, accepts, nullable, schema_of_reader
from handler.protocols.kernel.texts import most_tokens
from handler.protocols.openai.api import ERRORS, AnswerHead, StreamUsage, TokenUsage

REASONS: Mapping[Finish | None, str | None] = {
    None: None,
    Finish.EOS: "stop",
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ERROR: "stop",
}


class Head(NamedTuple):
    """The fields of an answer that are the same in all of its chunks."""

    id: str
    created: int
    model: str = ""
    fingerprint: str = ""

    def value(self, kind: str) -> AnswerHead:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def identity(prefix: str) -> tuple[str, int]:
    """Return a new id, and the time of the request."""
    return f"{prefix}-{new_digits()}", int(time.time())


class Usage(NamedTuple):
    """`stream_options`: report token counts at a stream's end, or in every chunk.

    Attributes:
        null: chunks without a count have `"usage": null`, as TGI's chats always do.
    """

    at_end: bool = False
    always: bool = False
    null: bool = False


def usage(
    num_prompt_tokens: int, num_tokens: int, num_thoughts: int | None = None, num_cached_tokens: int = 0
) -> TokenUsage:
    """Return the counts.

    Args:
        num_thoughts: the tokens of thoughts; None if reasoning is not separated.
        num_cached_tokens: tokens of the prompts found in the engine's cache, if it reports them.
    """
    counts: TokenUsage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
    if num_thoughts is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
    if num_cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": num_cached_tokens}
    return counts


_COUNTS: TokenUsage = {"prompt_tokens": NUMBER, "completion_tokens": NUMBER, "total_tokens": NUMBER}


class Choice:
    """The state of one choice in a stream.

    `text_event` is the template of a chunk with only text, or of its part if chunks have counts. It is None until the
    choice has begun, and if more than the text changes.
    """

    __slots__ = ("begun", "index", "text_event")

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.text_event: bytes | None = None


C = TypeVar("C", bound=Choice)


class Stream(TokenStream, Generic[C]):
    """A stream with a chunk per token, each of one choice; then `usage` on request, and `[DONE]`.

    Subclasses render a choice's part of a chunk.

    Args:
        choices: those of each request in turn.
    """

    def __init__(
        self,
        head: Head,
        choices: Sequence[C],
        wanted: Usage,
        num_requests: int = 1,
        framing: Framing = SSE_DONE,
        errors: ErrorFormat = ERRORS,
    ) -> None:
        super().__init__(errors, framing, num_requests, len(choices) // num_requests)
        self._fields = head
        self._choices = choices
        self._usage = wanted
        counts: StreamUsage = {"usage": _COUNTS if wanted.always else None} if wanted.always or wanted.null else {}
        self._event = template(framing.encode(self._value([SLOT], counts)))
        self._is_text = not wanted.always  # a token's text alone makes its chunk, by `Choice.text_event`

    def _token(self, place: int, token: Token) -> bytes:
        choice = self._choices[place]
        if choice.text_event is not None:
            return self._text_chunk(choice.text_event, token.text)
        return self._begin(choice, place, token)

    def _last(self, place: int, token: Token, finish: Finish) -> bytes:
        part = self._part(self._choices[place], token, finish)
        return b"" if part is None else self._chunk(JSON.encode(part))

    def _begin(self, choice: C, place: int, token: Token) -> bytes:
        """Encode the chunk of a token, and find out whether later ones differ only in their text."""
        part = self._part(choice, token, None)
        if part is None:
            return b""
        choice.begun = True
        if self._is_plain:
            text_part = JSON.encode(self._text_part(choice, SLOT))
            choice.text_event = template(text_part if self._usage.always else self._chunk(text_part))
            self._events[place] = choice.text_event if self._is_text else None
        return self._chunk(JSON.encode(part))

    def _text_chunk(self, event: bytes, text: str) -> bytes:
        data = event % JSON_TEXTS[text]
        return self._chunk(data) if self._usage.always else data

    def _value(self, choices: list[Any], counts: StreamUsage) -> Mapping[str, object]:
        """Render a chunk."""
        raise NotImplementedError

    @property
    def _is_plain(self) -> bool:
        """Return whether parts with text differ only in the text."""
        raise NotImplementedError

    def _text_part(self, choice: C, text: str) -> Mapping[str, Any]:
        """Render the part of a choice that has only text."""
        raise NotImplementedError

    def _part(self, choice: C, token: Token, finish: Finish | None) -> Mapping[str, Any] | None:
        """Render a choice's part of a chunk; None if there is nothing to send yet.

        Args:
            finish: why the choice ends with the token.
        """
        raise NotImplementedError

    def _chunk(self, part: bytes) -> bytes:
        """Put a choice's part into a chunk."""
        if not self._usage.always:
            return self._event % part
        num_prompt_tokens, num_tokens = self._num_prompt_tokens, self._num_tokens
        return self._event % (part, num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens)

    def _end(self) -> bytes:
        chunk = b""
        if self._usage.at_end:
            counts = usage(self._num_prompt_tokens, self._num_tokens, self._count_thoughts(), self._num_cached_tokens)
            chunk = self._framing.encode(self._value([], {"usage": counts}))
        return chunk + self._framing.end

    def _count_thoughts(self) -> int | None:
        """Count the tokens of thoughts; None if reasoning is not separated."""
        return None


class WholeAnswer(WholeReply):
    """A whole answer as one object, which subclasses render.

    Args:
        num_sequences: sequences of each request.
    """

    def __init__(self, head: Head, num_requests: int, num_sequences: int, framing: Framing = JSON) -> None:
        super().__init__(num_requests * num_sequences, framing=framing)
        self._head = head
        self._each = num_sequences

    def start(self, index: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens += num_prompt_tokens

    def _of(self, index: int, delta: Delta) -> SequenceOutput:
        return self._sequences[index * self._each + delta.sequence]

    def _usage(self, num_thoughts: int | None = None) -> TokenUsage:
        """Return the counts; `num_thoughts` as in `usage`."""
        num_tokens = sum(sequence.num_tokens for sequence in self._sequences)
        num_cached_tokens = sum(first.extras.num_cached_tokens or 0 for first in self._sequences[:: self._each])
        return usage(self._num_prompt_tokens, num_tokens, num_thoughts, num_cached_tokens)


@accepts(type="integer", minimum=0, maximum=MAX_TOP_TOKENS)
def top_logprobs(value: Any, context: ServerContext) -> int:
    """Read the count. Without alternatives in the engine, 1 asks for the chosen token only, as in LMI."""
    count = integer(0, MAX_TOP_TOKENS)(value)
    return 0 if count == 1 and "top_logprobs" in context.unsupported else count


@accepts(type="object", required=["type"], properties={"type": {"type": "string"}})
def _format(value: Any) -> StructuredOutput | None:
    """Read OpenAI's `response_format`, or TGI's with `value`, which huggingface_hub's client sends."""
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
    """Read vLLM's `structured_outputs`, an object with exactly one name."""
    wanted = f"must be an object with one of {', '.join(_STRUCTURED_OUTPUT_READERS)}"
    given = {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or not given.keys() <= _STRUCTURED_OUTPUT_READERS.keys():
        raise ValueError(wanted)
    ((name, item),) = given.items()
    return _STRUCTURED_OUTPUT_READERS[name](item)


@accepts(type="integer", minimum=-(1 << 63), maximum=(1 << 64) - 1)
def _seed(value: Any) -> int:
    """Read a signed seed, as OpenAI and vLLM have it."""
    return integer(-(1 << 63), (1 << 64) - 1)(value) % (1 << 64)


@accepts(type="integer", minimum=-1)
def _budget(value: Any) -> int | None:
    """Read vLLM's `thinking_token_budget` (vllm/sampling_params.py); -1 is no limit."""
    budget = integer(-1)(value)
    return budget if budget >= 0 else None


_OF_VLLM: Mapping[str, Parameter] = {
    "truncate_prompt_tokens": Parameter("truncate", most_tokens),
    "structured_outputs": Parameter("structured_output", structured_outputs),
    "use_beam_search": unsupported("there is no beam search on this route", False),
    "prompt_logprobs": unsupported("ask for echo with logprobs on /v1/completions", [], {}),
    "allowed_token_ids": unsupported("the engines have no such parameter", [], {}),
    "return_tokens_as_token_ids": unsupported("tokens are shown as text", False),
    "return_token_ids": unsupported("tokens are shown as text", False),
    "logits_processors": unsupported("requests cannot contain code", [], {}),
}

FOREIGN: Mapping[str, Parameter] = {
    "parameters": unsupported("write its names at the top level", {}),
    "max_new_tokens": unsupported("write max_tokens"),
    "max_output_tokens": unsupported("write max_tokens"),
    "min_new_tokens": unsupported("write min_tokens", 0),
    "min_length": unsupported("write min_tokens", 0),
    "stop_sequences": unsupported("write stop", [], ""),
    "ignore_eos_token": unsupported("write ignore_eos", False),
    "do_sample": unsupported("write temperature=0", True),
    "bad_sequences": unsupported("write bad_words", [], ""),
    "num_return_sequences": unsupported("write n", 1),
    "random_seed": unsupported("write seed"),
    "truncate": unsupported("write truncate_prompt_tokens"),
    "top_n_tokens": unsupported("write logprobs", 0),
    "grammar": unsupported("write response_format"),
    "adapter_id": unsupported("write the adapter's name as model", ""),
    "adapters": unsupported("write the adapter's name as model", "", []),
}
"""Names of LMI, of TGI and of OpenAI's Responses API with a clear meaning: ignoring them would change the answer."""

_BOTH = {
    **named("openai"),
    "seed": Parameter("seed", _seed),
    "temperature": Parameter("temperature", number(0, 2)),
    "logprobs": Parameter("", boolean),
    "top_logprobs": Parameter("top_logprobs", top_logprobs, informed=True),
    "response_format": Parameter("structured_output", _format),
    **_OF_VLLM,
    **FOREIGN,
}

CHAT = Table(
    {
        **_BOTH,
        "max_completion_tokens": PARAMETERS["max_new_tokens"],
        "functions": unsupported("it has become `tools`", [], {}),
        "function_call": unsupported("it has become `tool_choice`", [], {}),
        "modalities": unsupported("answers are text", ["text"]),
        "audio": unsupported("answers are text", [], {}),
        "web_search_options": unsupported("web search is not available", [], {}),
        "echo": unsupported("an answer does not repeat messages", False),
        "add_special_tokens": unsupported("the chat template has them all", False),
        "chat_template": unsupported("write option.chat_template", [], {}),
        **{name: Parameter(name, read) for name, read in TEMPLATE_READERS.items()},
        "include_reasoning": Parameter("include_reasoning", boolean),
        "thinking_token_budget": Parameter("thinking_token_budget", _budget),
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
        "suffix": unsupported("the engines only continue a prompt", ""),
        "prompt_embeds": unsupported("a prompt is text or token ids", []),
        "add_special_tokens": unsupported("send token ids for a prompt without them", True),
    }
)

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "reasoning_effort", "verbosity", "request_id", "guided_decoding_backend",
        "tool_prompt", "cache_salt",
    }
)  # fmt: skip
"""Names that clients of OpenAI, vLLM or TGI send and that change no answer: listed in a header, never refused."""

_UNNAMED = ("tgi", "dummy")  # names that clients of TGI send by default
_ADDRESS = re.compile("https?://[^/]", re.IGNORECASE)
"""@huggingface/inference sends the server's address when it was given no model."""


MODEL: Mapping[str, Shape] = {
    "model": {
        **nullable(TEXT),
        "description": "The name of the model or of an adapter; an empty text or an HTTP address means the model",
    }
}
"""What `read_model` reads."""


def read_model(
    body: Mapping[str, Any], context: ServerContext, own: str = "", adapter: Adapter | None = None
) -> tuple[str, Adapter | None]:
    """Read `model`: the name in the answer, and the adapter of that name. An http address is the model itself.

    Args:
        own: the model's name in answers to bodies that name none; "" for `context.own_name`.
        adapter: the adapter that the request names elsewhere, which overrides `model`; None for that of the headers.

    Raises:
        ModelNotFound: neither the model nor an adapter has that name.
        InvalidPayload: `model` names another adapter than the request does elsewhere.
    """
    own = own or context.own_name
    names = (own, *context.model_names)
    name = _read_name(body)
    if adapter := adapter or context.adapter:
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
    """Read the text of `model`; "" if it is absent."""
    given = body.get("model")
    if given is None or given == "":
        return ""
    try:
        name = string(given)
    except ValueError as error:
        raise InvalidParameter(f"model: {error}") from None
    if len(name) > MAX_NAME:  # each chunk repeats it
        raise InvalidParameter(f"model: has {len(name)} characters; at most {MAX_NAME}")
    return name


def _find(name: str, context: ServerContext) -> Adapter | None:
    return None if context.no_adapters else context.adapters.find(name)


_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""`include_obfuscation` has no effect: this server pads no chunk."""


def names(prompt: str, parameters: ParsedParameters) -> FieldNames:
    """Return the client's names of the fields that later checks refuse."""
    ruled = parameters.sampling.structured_output is not None  # without a name by the tools' schemas
    structured_output = parameters.names.get("structured_output", "tools" if ruled else "response_format")
    if structured_output == "tool_choice":
        structured_output = "tools"
    return FieldNames(
        prompt=prompt,
        max_new_tokens=parameters.names.get("max_new_tokens", "max_tokens"),
        stop_token_ids="stop_token_ids",
        bad_token_ids="bad_words",
        logit_bias="logit_bias",
        structured_output=structured_output,
    )


def read_stream(body: Mapping[str, Any], context: ServerContext) -> tuple[bool, Usage]:
    """Read `stream` and `stream_options`."""
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidParameter(f"stream={show(stream)}: must be true or false")
    stream = bool(stream)
    read = functools.partial(read_usage, force=context.config.enable_force_include_usage)
    if options is None:
        return stream, read({})
    if not stream:
        raise InvalidParameter(f"stream_options={show(options)}: needs stream=true")
    return True, Named("stream_options", options).read(read)


@accepts(
    type="object",
    properties={name: {"type": ["boolean", "null"]} for name in _STREAM_OPTIONS},
    additionalProperties=False,
)
def read_usage(options: Any, *, force: bool = False) -> Usage:
    """Read `stream_options`.

    Args:
        force: send counts at the end whatever the options are.
    """
    if not isinstance(options, dict):
        raise ValueError("must be an object")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            raise ValueError(f"{name[:64]!r} is not known")
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name!r} must be true or false")
    at_end = force or bool(options.get("include_usage"))
    return Usage(at_end, at_end and bool(options.get("continuous_usage_stats")), null=at_end)


STREAM: Mapping[str, Shape] = {"stream": nullable(FLAG), "stream_options": nullable(schema_of_reader(read_usage))}
"""What `read_stream` reads."""


def streaming(
    requests: tuple[Request, ...],
    reply: Reply,
    errors: ErrorFormat,
    ignored: Sequence[str],
    framing: Framing = SSE_DONE,
) -> ParsedRequest:
    """Return the request of a stream. Only server-sent events have comments, which keep a connection open."""
    keep_alive = KEEP_ALIVE if framing.content_type == SSE_DONE.content_type else b""
    return ParsedRequest(requests, reply, errors, ignored, streams=True, keep_alive=keep_alive)


class OpenAiDialect(Dialect):
    """A dialect with OpenAI's conventions: parameters and `model` at the top level, read as laxly as vLLM does.

    Attributes:
        table: the fields that set parameters.
        fields: the others, with their values.
        needed: a description of a valid body.
        harmless: names that change no answer; empty: those in HARMLESS that are not read.
        accepted: names that are read elsewhere, or that have no meaning.
    """

    errors: ErrorFormat = ERRORS
    table: Table
    fields: Mapping[str, Shape]
    needed: str
    harmless: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        if not isinstance(body, dict):
            raise InvalidPayload(f"the body must be {self.needed}")
        return self.read(self._relax()(body), context)

    @abstractmethod
    def read(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        """Read a body whose numbers and flags have been converted."""

    def read_model(self, body: Mapping[str, Any], context: ServerContext) -> tuple[str, Adapter | None]:
        """Read the model's name for the answer, and the LoRA adapter."""
        return read_model(body, context)

    def ignored(self, body: Mapping[str, Any], context: ServerContext, *unknown: str) -> list[str]:
        """List the names without effect: unknown ones, with others as in `unknown`, and the harmless ones."""
        return [*self.unknown(body, context, *unknown), *self.no_effect(body)]

    def unknown(self, body: Mapping[str, Any], context: ServerContext, *others: str) -> list[str]:
        """List the unknown names, with others; null means absent."""
        known, harmless = self._known(), self._harmless()
        names = [key for key, value in body.items() if value is not None and key not in known and key not in harmless]
        return report_unknown([*names, *others], body, context)

    def no_effect(self, body: Mapping[str, Any]) -> list[str]:
        """List the harmless names that the body has a value for."""
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
    def _relax(cls) -> Callable[[Any], Any]:
        return relaxed_by(PYDANTIC, {**cls.fields, **cls.table.shapes})

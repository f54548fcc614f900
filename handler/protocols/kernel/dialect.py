"""A dialect, which reads a body and writes the answer, and the server's properties that it uses."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from handler.config.config import Config
from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import dumps
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Request, Task, Token
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.schema import Shape

log = logging.getLogger("handler.requests")

DEFAULT_MAX_MEDIA = 32
"""Media of one kind in a request, unless option.limit_mm_per_prompt gives a number."""


class GenerationDefaults(NamedTuple):
    """Values of the parameters that a client leaves out.

    Attributes:
        sampling: fields of Sampling; without those that the engine does not support.
        max_new_tokens: of an answer that would otherwise fill the context; None allows that.
        most_new_tokens: of every answer, whatever its client asks for; None: any number.
    """

    sampling: Mapping[str, Any] = MappingProxyType({})
    max_new_tokens: int | None = None
    most_new_tokens: int | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The values by their names in generation_config.json."""
        length = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**self.sampling, **length}


NO_DEFAULTS = GenerationDefaults()


class AdapterLookup(Protocol):
    """The LoRA adapters that requests may name."""

    def find(self, name: str) -> Adapter | None:
        """Find an adapter by the name under which it was registered."""

    def by_number(self, number: int) -> Adapter | None:
        """Find an adapter by the number that it got when it was registered."""

    def names(self) -> Iterable[str]:
        """Return the names of the adapters that requests may ask for."""


class NoAdapters:
    """The lookup of a server without adapters."""

    def find(self, name: str) -> Adapter | None:
        return None

    def by_number(self, number: int) -> Adapter | None:
        return None

    def names(self) -> Iterable[str]:
        return ()


class Notices:
    """Log lines that a server writes once, however many requests cause them. Thread-safe."""

    def __init__(self) -> None:
        self._given: dict[str, object] = {}

    def once(self, message: str) -> None:
        """Log a warning only once. It must not contain a client's text, so that there are few."""
        this = object()
        if self._given.setdefault(message, this) is this:
            log.warning("%s", message)


@dataclass(frozen=True)
class ServerContext:
    """The server's options and its engine's limits, for dialects.

    Attributes:
        engine: the engine's name.
        config: the options.
        unsupported: Sampling field -> why the engine does not support it.
        limits: Sampling field -> the largest value that the engine takes.
        no_adapters: why the engine serves no LoRA adapters; "" if it does.
        adapters: the registered adapters; thread-safe.
        adapter: the one that this request's headers name; the body may name no other.
        sampling_defaults: Sampling fields for a request that has `do_sample` true and no value of its own.
        generation: the model's defaults, for dialects that read parameters by `read_sampled`.
        vocabulary: the tokens that ids stand for; None if each prompt brings its own vocabulary.
        most_tokens: tokens of prompt and answer together that the model takes; None until it has been loaded.
        chat_template: the model's own chat template; "" without one.
        model_names: names that requests may give the model, its own first; "*" among them allows any name.
        source: the last part of the model's path or address; "" if there is none, as with echo.
        fingerprint: the `system_fingerprint` of answers.
        tool_format: a `Format` of `assistant/`, that of `option.tool_parser_plugin`, which comes before
            `option.tool_call_parser`; or None.
        response_template: a `ResponseTemplate` of `assistant/`, the model's own, if it parses the answers; or None.
        structural_tags: xgrammar's styles of arguments that the engine's structural tags have.
        task: what the model computes; requests for anything else are refused when they have been parsed.
        labels: names of the numbers of a classification.
        no_media: by kind, why messages may not have such media; "" if they may. Other kinds are not allowed.
            max_media: by kind, the maximum of one request.
        prompts: the model's own prompts for embeddings by name, each the beginning of a text.
        tokenizer_config: the model's tokenizer_config.json, where `option.enable_tokenizer_info_endpoint` shows it.
        notices: what the log has said.
        keeper: stores this request's answer; None if nothing is stored.
        recalled: the stored answers that this request continues.
        parsed: the cache of `read_all`; a context made from another has its own.
    """

    engine: str
    config: Config = field(default_factory=Config)
    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = "it has none"
    adapters: AdapterLookup = field(default_factory=NoAdapters)
    adapter: Adapter | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    generation: GenerationDefaults = NO_DEFAULTS
    vocabulary: Vocabulary | None = None
    most_tokens: Callable[[], int | None] = lambda: None
    chat_template: str = ""
    model_names: Sequence[str] = ("model",)
    source: str = ""
    fingerprint: str = "lmi"
    tool_format: Any = None
    response_template: Any = None
    structural_tags: frozenset[str] = frozenset()
    task: Task = Task.GENERATION
    labels: Sequence[str] = ()
    no_media: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_media: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    tokenizer_config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notices: Notices = field(default_factory=Notices, compare=False)
    keeper: Keeper | None = None
    recalled: Recalled = field(default_factory=lambda: Recalled())
    parsed: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def own_name(self) -> str:
        """The model's name in answers to bodies that name none: the first of option.served_model_name, as in vLLM."""
        return next((name for name in self.config.served_model_name or () if name != "*"), self.model_names[0])


class Timing(NamedTuple):
    """The duration of each part of a whole answer, in seconds, and its number of tokens."""

    validation: float  # from the request's arrival until its prompt was found to fit
    queue: float  # until the engine got it
    inference: float  # until its last token
    num_prompt_tokens: int
    num_tokens: int

    @property
    def total(self) -> float:
        return self.validation + self.queue + self.inference


def no_headers(timing: Timing | None) -> Headers:
    return ()


TokenEncoder = Callable[[Token], bytes]
"""Encodes a token as the next bytes of a stream."""


class Reply(ABC):
    """The answer to one client, in progress.

    `feed` takes the client's deltas in order and returns the bytes to send now, possibly none. After the last delta
    `finished` is true. An error ends a stream; before anything was sent, `ParsedRequest.errors` renders it.
    """

    content_type: str
    finished: bool

    def start(self, index: int, num_prompt_tokens: int) -> None:  # noqa: B027
        """Note that request number `index` was accepted."""

    @abstractmethod
    def feed(self, index: int, delta: Delta) -> bytes:
        """Return the bytes for the next delta of request number `index`. Only a stream is fed an error."""

    def takes_long(self, delta: Delta) -> bool:
        """Return whether `feed` takes long with this delta, so that it should run on a thread."""
        return False

    def token_encoder(self) -> TokenEncoder | None:
        """Return an encoder of the only sequence's next tokens; None if `feed` has to be called instead, possibly
        only for now. It does what `feed` does with a delta of only one token, at less cost.
        """
        return None


class ParsedRequest(NamedTuple):
    """One HTTP request: its prompts, and the reply that writes their answer.

    Attributes:
        requests: empty if the answer needs no engine; the reply then ends with the first delta, which has no tokens.
        errors: renders a failure before anything was sent.
        ignored: names in the body without effect: those that no dialect knows, and those that this answer ignores.
        of_tokens: a user's output formatter that takes tokens applies to this answer.
        as_openai: makes a reply that writes the same as OpenAI's document, or as its chunks in lines or events, which
            a user's other output formatters may take. None: none of them applies.
        formatter: the title of the user's function that the reply runs, for messages; "" without one. `feed` then
            takes its time and may raise FormatterFailed; feed it a delta with that error, as for any failure.
        headers: the dialect's own headers; called with None when a stream starts, before the timing is known.
        keep_alive: bytes that a stream sends when it has been silent for a while; b"" for none.
        keeps: the reply's last `feed` stores the answer, and blocks until that is done. take_prompt: passes the
            prompt to the reply, whose answer depends only on it, even if it is too long for the model; called on any
            thread. None: the engine answers.
        num_repeated: bytes of the request that the answer repeats, besides prompts and parameters, times the number
            of repetitions.
    """

    requests: Sequence[Request]
    reply: Reply
    errors: ErrorFormat
    ignored: Sequence[str] = ()
    streams: bool = False
    of_tokens: bool = False
    as_openai: Callable[[], Reply] | None = None
    formatter: str = ""
    headers: Callable[[Timing | None], Headers] = no_headers
    keep_alive: bytes = b""
    keeps: bool = False
    take_prompt: Callable[[Prompt], None] | None = None
    num_repeated: int = 0


RequestShape = Callable[[ServerContext], Shape]
"""The schema of a request's body for one server: the parameters' descriptions name what its engine does not support."""


class Description(NamedTuple):
    """The bodies of one dialect, for the API's document.

    Attributes:
        request: the name of the request's component.
        request_shape: the schema of that component.
        error: the type of an error's body.
        example: a request that any model can answer.
        answer: the type of a whole answer; None if the route always streams.
        chunk: the type of one value of a stream; None if the route never streams.
        failure: the type of the last value of a stream that broke off; None if it is an error's body.
        streams: content types of streams; each value is framed separately.
        refuses_in_frame: a refused request for a stream gets `failure`, framed as the stream would be.
        texts: a whole answer may also be plain text.
    """

    title: str
    request: str
    request_shape: RequestShape
    error: Any
    example: Any
    answer: Any = None
    chunk: Any = None
    failure: Any = None
    streams: tuple[str, ...] = ()
    refuses_in_frame: bool = False
    texts: bool = False


class Dialect(ABC):
    """The API that a client speaks. README.md says how to add one.

    Attributes:
        description: its bodies, for the API's document.
        any_media: read bodies as JSON whatever their content type is.
        forms: bodies may also be forms (multipart/form-data); `parse` gets their texts and files (`Upload`) by name.
        unique_keys: refuse a body with a duplicate key, as its original does; otherwise the last one counts. errors:
            its form of errors if nothing is known about the request.
    """

    name: str
    any_media = False
    forms = False
    unique_keys = False
    errors: ErrorFormat
    description: Description

    @abstractmethod
    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        """Read a decoded body.

        Raises:
            InvalidPayload, InvalidParameter: naming what is wrong, and what would be right.
        """

    def wanted(self, body: Any) -> Wanted | None:
        """Return the stored answers that a body refers to, if the server stores any; None: it needs none, and its own
        is not stored.
        """
        return None

    def errors_of(self, body: Any, context: ServerContext) -> ErrorFormat:
        """Return the form of errors for a body; a wrong one is read as far as possible.

        Args:
            body: None if it was not decoded.
        """
        return self.errors


# -- answers that are kept, so that later requests go on from them -----------------------------------------------------


Kind = Literal["response", "thread"]
"""An answer of the Responses API, or one in a thread of Anthropic's."""


class Wanted(NamedTuple):
    """The stored answers that a body refers to.

    Attributes:
        keeps: its own answer is to be stored. previous: the id of the answer that it continues; "" for none.
        items: ids of single items that it names.
    """

    kind: Kind
    keeps: bool
    previous: str = ""
    items: Sequence[str] = ()


State = Literal["found", "missing", "broken", "in_progress", "failed", "too_long"]


class Recalled(NamedTuple):
    """The stored values that were found.

    Attributes:
        state: of the answer that the body continues; "broken": one before it is no longer stored. head: what was
            stored with the first answer of the conversation.
        history: the items of all answers before, each one's input and then its output.
        items: those that the body names and that are stored, by id. size: bytes of all of it.
    """

    state: State = "found"
    head: Mapping[str, Any] = MappingProxyType({})
    history: Sequence[Any] = ()
    items: Mapping[str, Any] = MappingProxyType({})
    size: int = 0


NOTHING = Recalled()


def too_long(field: object, what: str, most: int) -> InvalidParameter:
    """Return the error for stored values that exceed the size of a request.

    Args:
        field: the body's field and its value.
        what: the stored values.
        most: the limit in bytes.
    """
    return InvalidParameter(f"{field}: {what} have more than {most} bytes (max_request_size)")


class KeptItem(NamedTuple):
    """An item of a request, as JSON."""

    id: str
    json: bytes


def kept_items(items: Iterable[Mapping[str, Any]]) -> list[KeptItem]:
    """Return items in their stored form.

    Raises:
        InvalidPayload: one can be read, but not written.
    """
    try:
        return [KeptItem(_id(item), dumps(item)) for item in items]
    except TypeError as error:
        raise InvalidPayload(f"the request cannot be stored: {error}") from None


def _id(item: Mapping[str, Any]) -> str:
    id = item.get("id")
    return id if isinstance(id, str) else ""


class KeptAnswer(NamedTuple):
    """An answer to store.

    Attributes:
        previous: the id of the answer before; "" for none.
        failed: it cannot be continued.
        head: everything but its items.
        given: the items of its request.
        output: its own.
    """

    id: str
    kind: Kind
    previous: str
    failed: bool
    head: Mapping[str, Any]
    given: Sequence[KeptItem]
    output: Sequence[Mapping[str, Any]]


class Keeper(Protocol):
    """Stores one client's answers."""

    def begin(self, id: str, answer: Mapping[str, Any]) -> object:
        """Note an answer in progress, for as long as the returned object exists."""

    def keep(self, answer: KeptAnswer) -> bool:
        """Store a finished answer; return whether it was stored. Blocking."""


class Keeping:
    """Stores one answer, for the reply that writes it.

    Args:
        given: the request's own items.
    """

    def __init__(self, keeper: Keeper, kind: Kind, previous: str, given: Sequence[KeptItem]) -> None:
        self._keeper, self._kind, self._previous, self._given = keeper, kind, previous, given
        self._in_progress: object = None

    def begin(self, id: str, answer: Mapping[str, Any]) -> None:
        """Note that the answer has begun."""
        self._in_progress = self._keeper.begin(id, answer)

    def end(
        self, id: str, head: Mapping[str, Any], output: Sequence[Mapping[str, Any]], *, failed: bool = False
    ) -> bool:
        """Store the finished answer; return whether it was stored. Blocking."""
        kept = self._keeper.keep(KeptAnswer(id, self._kind, self._previous, failed, head, self._given, output))
        self._in_progress = None
        return kept

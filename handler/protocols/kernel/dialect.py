"""The base class of dialects, and the server context that is passed to dialects.

A dialect is a subclass of `Dialect` that has these parts:

* `parse` converts a decoded body to a `ParsedRequest`, which has the requests to the engine and the reply.
* The `Reply` converts the engine's output to the bytes of the response: one document, or a stream.
* `errors`, an `ErrorFormat`, renders errors before the first byte, and the end of a stream that fails.

`description` describes all bodies for the OpenAPI document. Only dialects with stored responses override `wanted`, and
only those whose error format depends on the body override `errors_of`.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from handler.config.config import Config
from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import dumps
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Request, Sampling, Task, Token
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.schema import Shape

log = logging.getLogger("handler.requests")

DEFAULT_MAX_MEDIA = 32
"""Maximum number of media of one kind in a request, unless option.limit_mm_per_prompt sets a different maximum."""


class GenerationDefaults(NamedTuple):
    """The model's defaults for parameters that a client omits, and its limit on new tokens.

    Attributes:
        sampling: the default values of Sampling fields that the engine supports, by field.
        max_new_tokens: the default maximum number of new tokens, or None if a response may fill the context.
        most_new_tokens: the maximum number of new tokens of any request, or None for no maximum.
    """

    sampling: Mapping[str, Any] = MappingProxyType({})
    max_new_tokens: int | None = None
    most_new_tokens: int | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The default values, by their names in generation_config.json."""
        length = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return {**self.sampling, **length}


NO_DEFAULTS = GenerationDefaults()


class AdapterLookup(Protocol):
    """Finds registered LoRA adapters by name or number."""

    def find(self, name: str) -> Adapter | None:
        """Return the adapter that is registered under a name, or None if there is none."""

    def by_number(self, number: int) -> Adapter | None:
        """Return the adapter with this registration number, or None if there is none."""

    def names(self) -> Iterable[str]:
        """Return the names of the registered adapters."""


class EmptyLookup:
    """The adapter lookup of a server without adapters."""

    def find(self, name: str) -> Adapter | None:
        return None

    def by_number(self, number: int) -> Adapter | None:
        return None

    def names(self) -> Iterable[str]:
        return ()


class Notices:
    """Logs each warning of a server only once, even if many requests cause the warning. Thread-safe."""

    def __init__(self) -> None:
        self._given: dict[str, object] = {}

    def once(self, message: str) -> None:
        """Log a warning unless it was logged before.

        The message must not contain text from clients, because all messages are retained in memory.
        """
        this = object()
        if self._given.setdefault(message, this) is this:
            log.warning("%s", message)


@dataclass(frozen=True)
class ServerContext:
    """The server options, model properties and engine limits that dialects use.

    Attributes:
        engine: the engine's name.
        config: the server's options.
        unsupported: maps a Sampling field to the reason why the engine does not support it.
        limits: maps a Sampling field to the largest value that the engine accepts.
        no_adapters: the reason why the engine serves no LoRA adapters, or "" if it serves them.
        adapters: the lookup of registered adapters, which is thread-safe.
        sampling_defaults: the default values of Sampling fields in a request with `do_sample` true.
        generation: the model's generation defaults, for dialects that call `read_sampled`.
        vocabulary: the vocabulary of token ids, or None if it depends on the prompt.
        eos: the ids of the end tokens that the model files list.
        most_tokens: returns the maximum number of tokens in a prompt and its response together, or None while the model
            loads.
        chat_template: the model's chat template, or "" if it has none.
        model_names: the model names that requests may use, with the model's own name first. "*" allows any name.
        source: the last part of the path or address of the model, or "" if the engine (such as echo) has no model.
        fingerprint: the `system_fingerprint` of responses.
        tool_format: the `Format` of `option.tool_parser_plugin`, which overrides `option.tool_call_parser`, or None.
        response_template: the model's `ResponseTemplate` if it is used to parse responses, or None.
        structural_tags: the styles of arguments that the engine supports in xgrammar's structural tags.
        task: the model's task. A request for another task is refused after it has been parsed.
        labels: the labels of a classification model, by class index.
        no_media: maps a kind of media to the reason why messages may not contain it, or to "" if they may. Kinds that
            are missing are not allowed either.
        max_media: maps a kind of media to its maximum number in a request.
        prompts: the model's own prompts for embeddings by name, each of which is prepended to a text.
        tokenizer_config: the model's tokenizer_config.json if `option.enable_tokenizer_info_endpoint` is set, or empty.
        notices: logs each warning only once.
        request: the values of the request that the host passes in addition to the body.
        parsed: the cache of `read_all`, which copies of the context do not share.
    """

    engine: str
    config: Config = field(default_factory=Config)
    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = "none is registered"
    adapters: AdapterLookup = field(default_factory=EmptyLookup)
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    generation: GenerationDefaults = NO_DEFAULTS
    vocabulary: Vocabulary | None = None
    eos: frozenset[int] = frozenset()
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
    request: RequestContext = field(default_factory=lambda: RequestContext())
    parsed: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def path_name(self) -> str:
        """The model name in the request path, or the model's own name if the path names no model."""
        return self.request.model or self.model_names[0]

    @property
    def own_name(self) -> str:
        """The name in responses to requests that name no model: the first of option.served_model_name, as in vLLM."""
        return next((name for name in self.config.served_model_name or () if name != "*"), self.model_names[0])

    def with_seed(self, sampling: Sampling) -> Sampling:
        """Return the parameters, adding a random seed to unseeded sampling if the engine supports seeds.

        Call this only for a response that reports the seed, because vLLM samples more slowly with a seed
        (vllm/v1/sample/ops/topk_topp_sampler.py).
        """
        needed = sampling.do_sample and sampling.seed is None and "seed" not in self.unsupported
        return sampling._replace(seed=random.getrandbits(53)) if needed else sampling


class Timing(NamedTuple):
    """The duration of each phase of a request in seconds, and the token counts."""

    validation: float  # from the request's arrival until its prompt was found to fit
    queue: float  # from then until the engine received the request
    inference: float  # from then until the last token
    num_prompt_tokens: int
    num_tokens: int

    @property
    def total(self) -> float:
        return self.validation + self.queue + self.inference


TokenEncoder = Callable[[Token], bytes]
"""Encodes a token as the next bytes of a stream."""


class Reply(ABC):
    """Converts the output of an engine for one request into the bytes of the response.

    `feed` accepts the deltas in order and returns the bytes to send now, possibly none. `finished` is true after the
    last delta. An error ends a stream. If nothing has been sent yet, `ParsedRequest.errors` renders the error instead.
    """

    content_type: str
    finished: bool

    def start(self, index: int, num_prompt_tokens: int) -> None:  # noqa: B027
        """Record that the request at `index` was accepted, and the number of tokens in its prompt."""

    @abstractmethod
    def feed(self, index: int, delta: Delta) -> bytes:
        """Return the bytes for the next delta of the request at `index`. Only a stream's delta may contain an error."""

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the response depends on log-probabilities. If not, engines need not compute them."""
        return True

    def takes_long(self, delta: Delta) -> bool:
        """Return whether `feed` takes so long for this delta that it should run on a thread."""
        return False

    def token_encoder(self) -> TokenEncoder | None:
        """Return an encoder for the next tokens of the only sequence, or None if `feed` must be called for now.

        The encoder is equivalent to `feed` with a delta of a single token, but faster.
        """
        return None


class ParsedRequest(NamedTuple):
    """A parsed HTTP request: a request to the engine for each prompt, and the reply that writes the response.

    Attributes:
        requests: the requests to the engine. If there are none, the reply finishes with its first delta, which has no
            tokens.
        errors: renders an error that occurs before anything has been sent.
        ignored: names in the body that have no effect.
        streams: whether the response is a stream.
        of_tokens: whether a user's output formatter that accepts tokens applies to the response.
        as_openai: creates a reply that writes the response in OpenAI's format, as a document or as chunks in lines or
            events, for a user's output formatters that accept this format. None if no such formatter applies.
        formatter: the title of the user's function that the reply runs, for messages, or "" if there is none. With
            a function, `feed` may take long or raise FormatterFailed. Pass that error to `feed` in a delta, as
            with any other failure.
        headers: returns the dialect's own headers. When a stream starts, it is called with None, because there is no
            timing yet.
        keep_alive: bytes that a stream sends after some time without output, or b"" for none.
        keeps: whether the last `feed` of the reply stores the response, and blocks until it is stored.
        take_prompt: passes the prompt to a reply that needs only the prompt and not the engine, even if the prompt is
            too long for the model. It may be called on any thread. It is None if the engine creates the response.
        stops: the `Request.id` of requests that this request stops, or "".
        num_repeated: the number of bytes of the request, apart from prompts and parameters, that the response repeats.
            Bytes that it repeats n times count n times.
        end: called when the request has finished, in whichever way. It ends what the reply has begun in the server.
    """

    requests: Sequence[Request]
    reply: Reply
    errors: ErrorFormat
    ignored: Sequence[str] = ()
    streams: bool = False
    of_tokens: bool = False
    as_openai: Callable[[], Reply] | None = None
    formatter: str = ""
    headers: Callable[[Timing | None], Headers] = lambda timing: ()
    keep_alive: bytes = b""
    keeps: bool = False
    take_prompt: Callable[[Prompt], None] | None = None
    stops: str = ""
    num_repeated: int = 0
    end: Callable[[], object] = bool


RequestShape = Callable[[ServerContext], Shape]
"""Returns the schema of a request body for a server. The schema says which parameters the engine does not support."""


class Description(NamedTuple):
    """The bodies of a dialect, as the OpenAPI document describes them.

    Attributes:
        title: the title of the dialect.
        request: the name of the schema component for requests.
        request_shape: returns the schema of that component.
        error: the type of the body of an error response.
        example: a request that any model can answer.
        answer: the type of a non-streaming response, or None if the route always streams.
        chunk: the type of each value in a stream, or None if the route never streams.
        failure: the type of the last value in a stream that failed, or None if it is the same as `error`.
        streams: the content types of streams, each of which frames values differently.
        refuses_in_frame: whether a refused request for a stream gets `failure`, framed as in the stream.
        texts: whether a non-streaming response may also be plain text.
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


class BinaryBody(NamedTuple):
    """A decoded JSON document, the binary data after it, and the content type of both."""

    document: Any
    data: bytes
    media_type: str = ""


class Dialect(ABC):
    """Base class of the APIs that clients may use. README.md describes how to add a dialect.

    Attributes:
        any_media: whether a body is read as JSON regardless of its content type.
        forms: whether a body may also be a form (multipart/form-data). `parse` then receives the texts and files
            (`Upload`) of the form by name.
        media_types: additional content types that are read as JSON.
        encodings: the values of Content-Encoding that are accepted besides identity.
        unique_keys: whether a body with a duplicate key is refused, as in the original API. Otherwise the last value
            is used.
        response_headers: the names of the headers that `ParsedRequest.headers` returns, which web pages may read.
        computes: whether a request counts as inference. TGI does not count requests that are only tokenized.
        errors: the error format for requests about which nothing is known.
        description: the description of the bodies for the OpenAPI document.
    """

    name: str
    any_media = False
    forms = False
    media_types: Collection[str] = ()
    encodings: Collection[str] = ()
    unique_keys = False
    response_headers: tuple[str, ...] = ()
    computes = True
    errors: ErrorFormat
    description: Description

    @abstractmethod
    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        """Parse a decoded body.

        Raises:
            InvalidPayload, InvalidParameter: the body is invalid. The message names the cause and a valid form.
        """

    def of_headers(self, headers: Mapping[str, str]) -> Dialect:
        """Return the dialect that the headers of a request select. By default, it is this dialect."""
        return self

    def document_length(self, body: bytes, headers: Mapping[str, str]) -> int | None:
        """Return the size in bytes of the JSON document before binary data, or None if there is no binary data.

        If this method returns a size, `parse` receives a `BinaryBody`.

        Raises:
            InvalidPayload: the headers contradict the body.
        """
        return None

    def wanted(self, body: Any) -> Wanted | None:
        """Return the stored responses that a body refers to.

        The result is None if the body refers to no stored response and its own response should not be stored.
        """
        return None

    def errors_of(self, body: Any, context: ServerContext) -> ErrorFormat:
        """Return the error format for a body. If the body is invalid, use as much of it as possible.

        Args:
            body: the decoded body, or None if it could not be decoded.
        """
        return self.errors


# -- stored responses, which later requests may continue ---------------------------------------------------------------


Kind = Literal["response", "thread"]
"""The API of a stored response: "response" for the Responses API, "thread" for threads in Anthropic's API."""


class Wanted(NamedTuple):
    """The stored responses that a body refers to.

    Attributes:
        keeps: whether the response to the body should be stored.
        previous: the id of the response that the body continues, or "" if it continues none.
        items: the ids of individual stored items that the body refers to.
    """

    kind: Kind
    keeps: bool
    previous: str = ""
    items: Sequence[str] = ()


State = Literal["found", "missing", "broken", "in_progress", "failed", "too_long"]


class Recalled(NamedTuple):
    """The stored responses and items for a request.

    Attributes:
        state: the state of the response that the body continues. "broken" means that an earlier response of the
            conversation is no longer stored.
        head: the fields that were stored with the first response of the conversation.
        history: the items of all earlier responses: the input of a response, then its output.
        items: the stored items that the body refers to, by id.
        size: the total size of these values in bytes.
    """

    state: State = "found"
    head: Mapping[str, Any] = MappingProxyType({})
    history: Sequence[Any] = ()
    items: Mapping[str, Any] = MappingProxyType({})
    size: int = 0


NOTHING = Recalled()


def too_long(field: object, what: str, most: int) -> InvalidParameter:
    """Return the error for stored values that exceed the maximum request size.

    Args:
        field: the field of the body that refers to the stored values, with its value.
        what: a plural noun for the stored values.
        most: the maximum size in bytes.
    """
    return InvalidParameter(f"{field}: {what} exceed {most} bytes (max_request_size)")


KeptItem = tuple[str, bytes]
"""The id of an item in a request, and the item encoded as JSON."""


def kept_items(items: Iterable[Mapping[str, Any]]) -> list[KeptItem]:
    """Encode items for storage.

    Raises:
        InvalidPayload: an item cannot be encoded as JSON.
    """
    try:
        return [(_id(item), dumps(item)) for item in items]
    except TypeError as error:
        raise InvalidPayload(f"the request cannot be stored: {error}") from None


def _id(item: Mapping[str, Any]) -> str:
    id = item.get("id")
    return id if isinstance(id, str) else ""


class KeptAnswer(NamedTuple):
    """A response to store.

    Attributes:
        previous: the id of the response that this response continues, or "" if it continues none.
        failed: whether the response failed, in which case no request can continue it.
        head: the fields of the response other than its items.
        given: the items of the request.
        output: the items of the response.
    """

    id: str
    kind: Kind
    previous: str
    failed: bool
    head: Mapping[str, Any]
    given: Sequence[KeptItem]
    output: Sequence[Mapping[str, Any]]


class Keeper(Protocol):
    """Stores the responses of one client."""

    def begin(self, id: str, answer: Mapping[str, Any]) -> None:
        """Record that a response is in progress until it is stored or its request ends."""

    def keep(self, answer: KeptAnswer) -> bool:
        """Store a finished response, and return whether it was stored. This call blocks."""

    def end(self) -> None:
        """Record that the request has ended, and with it its response in progress."""


class RequestContext(NamedTuple):
    """The values of a request that the host passes to `parse` in addition to the body.

    Attributes:
        adapter: the adapter that the headers name, or None. The body must not name another adapter.
        model: the model name in the path, or "" if there is none.
        keeper: the object that stores the response, or None if the response should not be stored.
        recalled: the stored responses that the request continues.
    """

    adapter: Adapter | None = None
    model: str = ""
    keeper: Keeper | None = None
    recalled: Recalled = NOTHING


NO_REQUEST = RequestContext()


class Keeping:
    """Stores the response that a reply writes.

    Args:
        previous: the id of the response that this response continues, or "" if it continues none.
        items: the items of the request.
    """

    def __init__(self, keeper: Keeper, kind: Kind, previous: str, items: Sequence[KeptItem]) -> None:
        self._keeper, self._kind, self._previous, self._given = keeper, kind, previous, items

    def begin(self, id: str, answer: Mapping[str, Any]) -> None:
        """Record that the response is in progress."""
        self._keeper.begin(id, answer)

    def end(
        self, id: str, head: Mapping[str, Any], output: Sequence[Mapping[str, Any]], *, failed: bool = False
    ) -> bool:
        """Store the finished response, and return whether it was stored. This call blocks."""
        return self._keeper.keep(KeptAnswer(id, self._kind, self._previous, failed, head, self._given, output))

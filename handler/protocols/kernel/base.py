"""The protocol of a dialect: read a body into requests, write one client's answer from their deltas, tell failures."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypedDict

from handler.config.config import Config
from handler.core.errors import InvalidParameter, InvalidPayload, ServingError, TooLong
from handler.core.framing import JSON
from handler.core.text import Prompt, Vocabulary
from handler.core.values import Adapter, Delta, Request, Task, Token
from handler.protocols.kernel.json_schema import Count, NotRequired

DEFAULT_MAX_MEDIA = 32
"""Media of one kind in a request, where option.limit_mm_per_prompt names no number."""


class AdapterLookup(Protocol):
    """The LoRA adapters that requests may name."""

    def find(self, name: str) -> Adapter | None:
        """Find an adapter by the name under which it was registered."""

    def by_number(self, number: int) -> Adapter | None:
        """Find an adapter by the number that it got when it was registered."""


class NoAdapters:
    """The lookup of a server without adapters."""

    def find(self, name: str) -> Adapter | None:
        return None

    def by_number(self, number: int) -> Adapter | None:
        return None


@dataclass(frozen=True)
class ServerContext:
    """The server's options and its engine's limits, for dialects.

    Attributes:
        engine: the engine's name.
        config: the options.
        unsupported: Sampling field -> why the engine does not support it.
        limits: Sampling field -> the largest value that the engine takes.
        no_adapters: why the engine serves no LoRA adapters; "" where it does.
        adapters: the registered adapters; thread-safe.
        sampling_defaults: Sampling fields for a request that has `do_sample` true and no value of its own.
        vocabulary: the tokens that ids stand for; None where each prompt brings its own vocabulary.
        most_tokens: tokens of prompt and answer together that the model takes; None until it has been loaded.
        chat_template: the model's own chat template; "" without one.
        model_names: names that requests may give the model, its own first; "*" among them allows any name.
        fingerprint: the `system_fingerprint` of answers.
        tool_format: a `Format` of `assistant/`, that of `option.tool_parser_plugin`, which comes before
            `option.tool_call_parser`; or None.
        separates_thoughts: thoughts are never part of the text, whatever `option.reasoning_parser` says.
        structural_tags: xgrammar's styles of arguments that the engine's structural tags have.
        task: what the model computes; requests for anything else are refused when they have been parsed.
        labels: names of the numbers of a classification.
        no_media: by kind, why messages may have no such media; "" where they may. Other kinds: none.
        max_media: by kind, the most of one request.
        prompts: the model's own prompts for embeddings by name, each the beginning of a text.
    """

    engine: str
    config: Config = field(default_factory=Config)
    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = "it has none"
    adapters: AdapterLookup = field(default_factory=NoAdapters)
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    vocabulary: Vocabulary | None = None
    most_tokens: Callable[[], int | None] = lambda: None
    chat_template: str = ""
    model_names: Sequence[str] = ("model",)
    fingerprint: str = "lmi"
    tool_format: Any = None
    separates_thoughts: bool = False
    structural_tags: frozenset[str] = frozenset()
    task: Task = Task.GENERATION
    labels: Sequence[str] = ()
    no_media: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_media: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def reasoning_parser(self) -> str:
        """Name of the thoughts' family, or auto; "" leaves thoughts in the text."""
        return self.config.reasoning_parser or ("auto" if self.separates_thoughts else "")


Headers = Sequence[tuple[str, str]]


class HttpResponse(NamedTuple):
    """A whole HTTP response.

    Attributes:
        retry_after: seconds after which the client may come again; 0 where nobody knows.
    """

    status: int
    content_type: str
    body: bytes
    retry_after: float = 0.0


_BUSY = frozenset({429, 503, 529})
_WAIT = (1.0, 4.0)  # seconds


def retry_headers(status: int, retry_after: float = 0.0) -> Headers:
    """Return the headers that say when to come again; none for statuses that time does not heal.

    A time that nobody knows is random, as clients add nothing to it: those that were refused together would come
    together again. OpenAI's and Anthropic's clients read the milliseconds, others whole seconds.

    Args:
        retry_after: seconds; 0 where nobody knows.
    """
    if status not in _BUSY:
        return ()
    seconds = retry_after or random.uniform(*_WAIT)
    return ("retry-after", str(math.ceil(seconds))), ("retry-after-ms", str(math.ceil(seconds * 1000)))


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


class FrontEndError(TypedDict):
    """The error of DJL Serving's front end (`code`, `type`, `message`), with our `error`."""

    code: Count
    type: str
    message: str
    error: NotRequired[str]


class ErrorFormat:
    """How a dialect tells that a request failed.

    Attributes:
        statuses: class of error -> the dialect's status, where it is not the error's own.
    """

    statuses: Mapping[type[ServingError], int] = MappingProxyType({})

    def status(self, error: ServingError) -> int:
        """Return the status of the nearest class that has one, in the dialect's table or of its own."""
        for kind in type(error).__mro__:
            if kind in self.statuses:
                return self.statuses[kind]
            if "status" in vars(kind):
                break
        return error.status

    def body(self, error: ServingError) -> Any:
        """Render the body of an answer that is nothing but the error."""
        raise NotImplementedError

    def tail(self, error: ServingError) -> Any:
        """Render the last value of a stream that broke off."""
        return self.body(error)

    def whole(self, error: ServingError) -> HttpResponse:
        """Render the answer where nothing has been sent."""
        return HttpResponse(self.status(error), JSON.content_type, JSON.encode(self.body(error)))


class FrontEndErrors(ErrorFormat):
    """Those of DJL Serving's front end, and of routes that have no dialect. A handler's own refusals have 424 there."""

    statuses = MappingProxyType({InvalidPayload: 424, InvalidParameter: 424, TooLong: 424})

    def body(self, error: ServingError) -> Any:
        """Render an error as the front end renders a request that it turns away."""
        message = error.message
        body: FrontEndError = {"code": self.status(error), "type": error.type, "message": message, "error": message}
        return body


FRONT_END = FrontEndErrors()

TokenLine = Callable[[Token], bytes]
"""Encodes a token as the next bytes of a stream."""


class Reply(Protocol):
    """The answer to one client, in progress.

    `feed` takes the client's deltas in order and returns the bytes to send now, possibly none. After the last delta
    `finished` is true. An error ends a stream; before anything was sent, `ParsedRequest.errors` renders it.
    """

    content_type: str
    finished: bool

    def start(self, index: int, num_prompt_tokens: int) -> None:
        """Note that request number `index` was accepted."""

    def feed(self, index: int, delta: Delta) -> bytes:
        """Return the bytes for the next delta of request number `index`. Only a stream is fed an error."""

    def token_line(self) -> TokenLine | None:
        """Return an encoder of the only sequence's next tokens; None where, or while, `feed` has to be asked.

        It does what `feed` does with a delta of one token and nothing else, at less cost.
        """
        return None


class ParsedRequest(NamedTuple):
    """One HTTP request: its prompts, and the reply that writes their answer.

    Attributes:
        requests: empty where the answer needs no engine; the reply then ends with the first delta, which has no tokens.
        errors: renders a failure before anything was sent.
        ignored: names in the body that no dialect knows.
        postprocess: makes the same reply with a function that changes its values before framing. None: a user's
            output formatter does not apply to this answer.
        formatter: the title of the user's function that the reply runs, for messages; "" without one. `feed` then
            takes its time and may raise FormatterFailed; feed it a delta with that error, as for any failure.
        headers: the dialect's own headers; called with None when a stream starts, before the timing is known.
        keep_alive: bytes that a stream sends when it has been silent for a while; b"" for none.
        take_prompt: hands the reply the prompt, of which alone the answer is made, however many tokens the model takes;
            called on any thread. None: the engine answers.
    """

    requests: Sequence[Request]
    reply: Reply
    errors: ErrorFormat
    ignored: Sequence[str] = ()
    streams: bool = False
    postprocess: Callable[[Callable[[Any], Any]], Reply] | None = None
    formatter: str = ""
    headers: Callable[[Timing | None], Headers] = no_headers
    keep_alive: bytes = b""
    take_prompt: Callable[[Prompt], None] | None = None


class Schema(ABC):
    """A dialect. README.md says how to add one.

    Attributes:
        any_media: read bodies as JSON whatever their content type is.
        unique_keys: refuse a body that has a key twice, as its original does; else the last one counts.
        errors: how it tells failures, where nothing of a request is known.
    """

    name: str
    any_media = False
    unique_keys = False
    errors: ErrorFormat

    @abstractmethod
    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        """Read a decoded body.

        Raises:
            InvalidPayload, InvalidParameter: naming what is wrong, and what would be right.
        """

    def errors_of(self, body: Any, context: ServerContext) -> ErrorFormat:
        """Return how it tells that it refuses a body, for which a wrong one is read as far as it can be.

        Args:
            body: None where it was not decoded.
        """
        return self.errors

"""What every dialect does: read a body into requests, and write one client's answer from their deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

from handler.core.errors import ServingError
from handler.core.text import Vocabulary
from handler.core.values import Adapter, Delta, Request


class AdapterLookup(Protocol):
    """The LoRA adapters that requests may name."""

    def find(self, name: str) -> Adapter | None:
        """By the name under which it was registered."""

    def by_number(self, number: int) -> Adapter | None:
        """By the number that it got when it was registered."""


class NoAdapters:
    """Where none can be registered."""

    def find(self, name: str) -> Adapter | None:
        return None

    def by_number(self, number: int) -> Adapter | None:
        return None


@dataclass(frozen=True)
class ServerContext:
    """What a schema must know of the server: its options and its engine's limits.

    Attributes:
        output_formatter: `option.output_formatter`, None when unset.
        refuse_unknown: names that no dialect knows are refused, not reported.
        max_sequences: most sequences that one request may ask for.
        engine: its name.
        unsupported: Sampling field -> why the engine has no such thing.
        limits: Sampling field -> the largest value that the engine takes.
        no_adapters: why it serves no LoRA adapters; "" where it does.
        adapters: those that there are now; thread-safe.
        sampling_defaults: Sampling fields of a request with `do_sample` true that names no value of its own for them.
        vocabulary: what every prompt's ids stand for; None where each prompt brings its own.
        most_tokens: those of prompt and answer together that the model takes; None while it has not been loaded.
        chat_template: the model's own; "" where it has none.
        model_names: what requests may call the model, its own name first; "*" among them is any name.
        fingerprint: what an answer says of the server and the engine that it comes from.
        tool_call_parser: `option.tool_call_parser`.
    """

    engine: str
    unsupported: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_adapters: str = "it has none"
    adapters: AdapterLookup = field(default_factory=NoAdapters)
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    vocabulary: Vocabulary | None = None
    most_tokens: Callable[[], int | None] = lambda: None
    output_formatter: str | None = None
    refuse_unknown: bool = False
    max_sequences: int = 32
    enable_streaming: bool = False
    chat_template: str = ""
    model_names: Sequence[str] = ("model",)
    fingerprint: str = "lmi"
    tool_call_parser: str = "auto"


class HttpResponse(NamedTuple):
    """A whole answer in one piece."""

    status: int
    content_type: str
    body: bytes


class Timing(NamedTuple):
    """How long the parts of a whole answer took, in seconds, and how much it was."""

    validation: float  # from the request's arrival until its prompt was found to fit
    queue: float  # until the engine got it
    inference: float  # until its last token
    num_prompt_tokens: int
    num_tokens: int

    @property
    def total(self) -> float:
        return self.validation + self.queue + self.inference


Headers = Sequence[tuple[str, str]]


def no_headers(timing: Timing | None) -> Headers:
    return ()


Count = Annotated[int, ("minimum", 0)]
"""A type in an answer. The pairs of `Annotated` are keywords of JSON Schema, for the API's document."""


class _FrontEndError(TypedDict):
    code: Count
    type: str
    message: str


class FrontEndError(_FrontEndError, total=False):
    """The error of DJL Serving's front end (`code`, `type`, `message`), with our `error`."""

    error: str


def front_end_error(error: ServingError) -> FrontEndError:
    """Render an error as DJL Serving's front end renders a request that it turns away."""
    return {"code": error.status, "type": error.type, "message": error.message, "error": error.message}


class Reply(Protocol):
    """One client's answer being written.

    `feed` takes the client's deltas in order and returns the bytes to send now, possibly none; after the last one
    `finished` is true. Before anything was sent, `refused` renders a failure as a whole answer with its status.
    """

    content_type: str
    finished: bool

    def start(self, index: int, num_prompt_tokens: int) -> None:
        """Request number `index` of the call was accepted."""

    def feed(self, index: int, delta: Delta) -> bytes:
        """Bytes for one more delta of request number `index`."""

    def refused(self, error: ServingError) -> HttpResponse:
        """The answer when nothing has been sent yet."""


class ParsedRequest(NamedTuple):
    """One HTTP request: its prompts, and the reply that writes their answer.

    Attributes:
        ignored: names in the body that no dialect knows.
        postprocess: makes the same reply with a function that changes its values before framing. None: a user's
            output formatter does not apply to this answer.
        formatter: the title of the user's function that the reply runs, for messages; "" without one. `feed` then
            takes its time and may raise FormatterFailed; feed it a delta with that error, as for any failure.
        headers: the dialect's own headers; called with None when a stream starts, before the timing is known.
        keep_alive: bytes that a stream sends when it has been silent for a while; b"" for none.
        failed: renders the end of a stream that has sent nothing but `keep_alive`. None: use `Reply.refused`.
    """

    requests: Sequence[Request]
    reply: Reply
    ignored: Sequence[str] = ()
    streams: bool = False
    postprocess: Callable[[Callable[[Any], Any]], Reply] | None = None
    formatter: str = ""
    headers: Callable[[Timing | None], Headers] = no_headers
    keep_alive: bytes = b""
    failed: Callable[[ServingError], bytes] | None = None


class Schema(Protocol):
    """A dialect. See protocols/README.md for how to add one.

    Attributes:
        any_media: bodies are JSON whatever their content type says.
    """

    name: str
    any_media: bool

    def parse(self, body: Mapping[str, Any], context: ServerContext) -> ParsedRequest:
        """Read a decoded body.

        Raises:
            InvalidPayload, InvalidParameter: naming what is wrong and what would have been right.
        """

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        """The answer to a request that was never put to the engine.

        Args:
            body: decoded, if it came to that.
            context: that of `parse`; None where the answer is not framed as a stream's would be.
        """

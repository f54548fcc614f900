"""The base class of dialects.

A dialect is a subclass of `Dialect` that has these parts:

* `parse` converts a decoded body to a `ParsedRequest`, which has the requests to the engine and the reply.
* The `Reply` converts the engine's output to the bytes of the response: one document, or a stream.
* `errors`, an `ErrorFormat`, renders errors before the first byte, and the end of a stream that fails.

`description` describes all bodies for the OpenAPI document. Only dialects with stored responses override `wanted`, and
only those whose error format depends on the body override `errors_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.text import Prompt
from handler.core.values import Request
from handler.protocols.kernel.context import NO_REQUEST, RequestContext, RequestShape, ServerContext
from handler.protocols.kernel.errors import ErrorFormat, Headers
from handler.protocols.kernel.reply import PreparedDocument, Reply
from handler.protocols.kernel.schema import Shape
from handler.protocols.kernel.stored import Detached, Wanted


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


class WithoutEngine(NamedTuple):
    """The course of a response that does not need the engine. The reply finishes with a delta without tokens.

    Attributes:
        take: passes the prompt of each request to the reply, even if it is too long for the model. It may be called on
            any thread.
        stops: the `Request.id` of requests that this request stops, or "".
    """

    take: Callable[[Prompt], object] = bool
    stops: str = ""


class FollowUp(NamedTuple):
    """The course of a response for which the engine may run twice.

    Attributes:
        next: called when the engine has finished the only request, but the reply has not. It returns the next request,
            whose output the reply gets with the index 1, or None if there is none. It may be called on any thread.
    """

    next: Callable[[], Request | None]


class Formats(NamedTuple):
    """How a user's output formatters may apply to a response.

    Attributes:
        of_tokens: whether a formatter that accepts tokens applies.
        as_openai: creates a reply that writes the response in OpenAI's format, as a document or as chunks in lines or
            events, for formatters that accept this format. None if no such formatter applies.
        title: the title of the user's function that the reply runs, for messages, or "" if there is none. With
            a function, `feed` may take long or raise FormatterFailed. Pass that error to `feed` in a delta, as
            with any other failure.
    """

    of_tokens: bool = False
    as_openai: Callable[[], Reply] | None = None
    title: str = ""


class ParsedRequest(NamedTuple):
    """A parsed HTTP request: a request to the engine for each prompt, and the reply that writes the response.

    Attributes:
        requests: the requests to the engine.
        errors: renders an error that occurs before anything has been sent.
        ignored: names in the body that have no effect.
        streams: whether the response is a stream.
        formats: how a user's output formatters may apply to the response.
        headers: returns the dialect's own headers, or None without such headers. When a stream starts, it is called
            with None, because there is no timing yet.
        keep_alive: bytes that a stream sends after some time without output, or b"" for none.
        keeps: whether the last `feed` of the reply stores the response, and blocks until it is stored.
        num_repeated: the number of bytes of the request, apart from prompts and parameters, that the response repeats,
            or that the prompts of several requests repeat. Bytes that are repeated n times count n times.
        detached: the response that is generated in the background and replaces the reply for the client, or None.
        course: how the response comes about, or None if the engine runs each of the requests once.
    """

    requests: Sequence[Request]
    reply: Reply
    errors: ErrorFormat
    ignored: Sequence[str] = ()
    streams: bool = False
    formats: Formats = Formats()
    headers: Callable[[Timing | None], Headers] | None = None
    keep_alive: bytes = b""
    keeps: bool = False
    num_repeated: int = 0
    detached: Detached | None = None
    course: WithoutEngine | FollowUp | None = None


class Description(NamedTuple):
    """The bodies of a dialect, as the OpenAPI document describes them.

    Attributes:
        title: the title of the dialect.
        request: the name of the schema component for requests.
        request_shape: returns the schema of that component.
        error: the type of the body of an error response.
        example: a request that any model can answer.
        response: the type of a non-streaming response, or None if the route always streams.
        chunk: the type of each value in a stream, or None if the route never streams.
        failure: the type of the last value in a stream that failed, or None if it is the same as `error`.
        streams: the content types of streams, each of which frames values differently.
        refuses_in_frame: whether a refused request for a stream gets `failure`, framed as in the stream.
        texts: whether a non-streaming response may also be plain text.
        form: the schema of a form, if it differs from that of a JSON body.
    """

    title: str
    request: str
    request_shape: RequestShape
    error: Any
    example: Any
    response: Any = None
    chunk: Any = None
    failure: Any = None
    streams: tuple[str, ...] = ()
    refuses_in_frame: bool = False
    texts: bool = False
    form: Shape | None = None


class BinaryBody(NamedTuple):
    """A decoded JSON document, the binary data after it, and the content type of both."""

    document: Any
    data: bytes
    media_type: str = ""


class Dialect(ABC):
    """Base class of the APIs that clients may use. README.md describes how to add a dialect.

    Attributes:
        any_media: whether a body is read as JSON regardless of its content type.
        forms: what a body that is a form (multipart/form-data) must contain, for messages, or "" if a body must not be
            a form. `parse` receives the texts and files (`Upload`) of a form by name.
        media_types: additional content types that are read as JSON.
        unique_keys: whether a body with a duplicate key is refused, as in the original API. Otherwise the last value
            is used.
        response_headers: the names of the headers that `ParsedRequest.headers` returns, which web pages may read.
        computes: whether a request counts as inference. TGI does not count requests that are only tokenized.
        errors: the error format for requests about which nothing is known.
        description: the description of the bodies for the OpenAPI document.
    """

    name: str
    any_media = False
    forms = ""
    media_types: Collection[str] = ()
    unique_keys = False
    response_headers: tuple[str, ...] = ()
    computes = True
    errors: ErrorFormat
    description: Description

    @abstractmethod
    def parse(self, body: Any, context: ServerContext, request_context: RequestContext = NO_REQUEST) -> ParsedRequest:
        """Parse a decoded body.

        Args:
            request_context: what the host knows of the request besides its body.

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


def prompt_request(
    request: Request, render: Callable[[Prompt], Iterable[bytes]], errors: ErrorFormat, ignored: Sequence[str]
) -> ParsedRequest:
    """Return a parsed request whose response is built from its prompt, without the engine.

    Args:
        render: yields the JSON of the document in parts, so that other threads can take the GIL between parts. This may
            take a long time.
    """
    reply = PreparedDocument(b"")

    def take(prompt: Prompt) -> None:  # on any thread, because the document is sent only afterwards
        reply.body = b"".join(render(prompt))

    return ParsedRequest((request,), reply, errors, ignored, course=WithoutEngine(take))

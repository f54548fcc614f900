"""The protocol of a dialect: read a body into requests, write one client's answer from their deltas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from handler.core.text import Prompt
from handler.core.values import Delta, Request, Token
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.http_response import Headers
from handler.protocols.kernel.kept import Wanted


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

    def takes_long(self, delta: Delta) -> bool:
        """Return whether `feed` takes long with this delta, so that a thread is to call it."""
        return False

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
        ignored: names in the body without effect: those that no dialect knows, and those that this answer ignores.
        of_tokens: a user's output formatter that takes tokens applies to this answer.
        as_openai: makes a reply that writes the same as OpenAI's document, or as its chunks in lines or events, which
            other output formatters of a user's may take. None: none of them applies.
        formatter: the title of the user's function that the reply runs, for messages; "" without one. `feed` then
            takes its time and may raise FormatterFailed; feed it a delta with that error, as for any failure.
        headers: the dialect's own headers; called with None when a stream starts, before the timing is known.
        keep_alive: bytes that a stream sends when it has been silent for a while; b"" for none.
        keeps: the reply's last `feed` keeps the answer, and blocks until that is done.
        take_prompt: hands the reply the prompt, of which alone the answer is made, however many tokens the model takes;
            called on any thread. None: the engine answers.
        num_repeated: bytes of the request that the answer repeats, beyond what prompts and parameters are, as often as
            it does.
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


class Dialect(ABC):
    """The API that a client speaks. README.md says how to add one.

    Attributes:
        any_media: read bodies as JSON whatever their content type is.
        forms: bodies may also be forms (multipart/form-data); `parse` gets their texts and files (`Upload`) by name.
        unique_keys: refuse a body that has a key twice, as its original does; else the last one counts.
        errors: how it tells failures, where nothing of a request is known.
    """

    name: str
    any_media = False
    forms = False
    unique_keys = False
    errors: ErrorFormat

    @abstractmethod
    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        """Read a decoded body.

        Raises:
            InvalidPayload, InvalidParameter: naming what is wrong, and what would be right.
        """

    def wanted(self, body: Any) -> Wanted | None:
        """Return what a body needs of the answers that are kept, where any are; None: nothing, nor is its own kept."""
        return None

    def errors_of(self, body: Any, context: ServerContext) -> ErrorFormat:
        """Return how it tells that it refuses a body, for which a wrong one is read as far as it can be.

        Args:
            body: None where it was not decoded.
        """
        return self.errors

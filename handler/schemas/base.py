"""What every dialect does: read a body into requests, and write one client's answer from their deltas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from handler.core import Delta, Request
from handler.errors import InvalidPayload, ServingError


@dataclass(frozen=True)
class Context:
    """What a schema must know of the server: its options and its engine's limits.

    Attributes:
        output_formatter: `option.output_formatter`, None when unset.
        refuse_unknown: names that no dialect knows are refused, not reported.
        max_sequences: most sequences that one request may ask for.
        engine: its name.
        lacks: Sampling field -> why the engine has no such thing.
    """

    engine: str
    lacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    output_formatter: str | None = None
    refuse_unknown: bool = False
    max_sequences: int = 32
    enable_streaming: bool = False


class Answer(NamedTuple):
    """A whole answer in one piece."""

    status: int
    content_type: str
    body: bytes


class Reply(Protocol):
    """One client's answer being written.

    `feed` takes the client's deltas in order and returns the bytes to send now, possibly none; after the last one
    `finished` is true. Before anything was sent, `failed` renders the failure as a whole answer with its status.
    """

    content_type: str
    finished: bool

    def start(self, index: int, prompt: str, prompt_tokens: int) -> None:
        """Request number `index` of the call was accepted; `prompt` is what the engine continues."""

    def feed(self, index: int, delta: Delta) -> bytes:
        """Bytes for one more delta of request number `index`."""

    def refused(self, error: ServingError) -> Answer:
        """The answer when nothing has been sent yet."""


class Call(NamedTuple):
    """What one HTTP request asks for: one or more prompts, and how to write their answer."""

    requests: Sequence[Request]
    reply: Reply
    ignored: Sequence[str] = ()
    streams: bool = False


class Schema(Protocol):
    """A dialect. See schemas/README.md for how to add one."""

    name: str

    def parse(self, body: Mapping[str, Any], context: Context) -> Call:
        """Read a decoded body.

        Raises:
            InvalidPayload, InvalidParameter: naming what is wrong and what would have been right.
        """

    def refused(self, error: ServingError) -> Answer:
        """The answer to a request that was never parsed."""


def decode(body: bytes) -> Any:
    """JSON, strictly: no duplicate keys, NaN, lone surrogates, or anything after the document.

    Raises:
        InvalidPayload: saying what is wrong, and where.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidPayload(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if "\\u" in text:  # only an escape can bring half a surrogate pair in
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidPayload(f"the body is not valid JSON: {error.msg} at {where}") from None
    except UnicodeEncodeError:
        raise InvalidPayload("the body is not valid JSON: a lone surrogate in a string") from None
    except RecursionError:
        raise InvalidPayload("the body is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise InvalidPayload(f"the body is not valid JSON: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")

"""API for a user's model.py (`handler.formatters`): decorators, and the types that formatters receive and return."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from handler.plugins.stand_ins.nd_list import from_nd_list


class Session(NamedTuple):
    """A stateful session of a client (docs/sessions.md).

    Attributes:
        directory: a directory for files of the user. It is removed when the session is closed or expires.
        expires: the time at which the session expires, in UTC.
    """

    id: str
    directory: Path
    expires: datetime


@dataclass(slots=True, eq=False, repr=False)
class Token:
    """A token of the response or of the prompt. `log_prob` is None if the engine does not compute it."""

    id: int
    text: str
    log_prob: float | None = None
    special_token: bool | None = None
    error_msg: str | None = None
    request_id: int | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"Token({self.id}, {self.text!r}, {self.log_prob})"

    def as_dict(self) -> dict[str, Any]:
        """Return the token as it appears in LMI responses."""
        value: dict[str, Any] = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        return {**value, "special_token": True} if self.special_token else value

    def as_tgi_dict(self) -> dict[str, Any]:
        """Return the token as it appears in TGI responses."""
        value: dict[str, Any] = {"id": self.id, "text": self.text, "logprob": self.log_prob}
        return {**value, "special": True} if self.special_token else value


class Sequence:
    """The tokens that a sequence has so far. `get_next_token` returns each token once.

    Args:
        with_index: whether `get_next_token` also returns the index of the token, as it has done since LMI 0.32.
    """

    def __init__(self, *, with_index: bool = True) -> None:
        self._with_index = with_index
        self.tokens: list[Token] = []
        self.top_tokens: list[list[Token]] = []
        self.cumulative_log_prob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self._taken = 0
        self._top_taken = 0

    def append(self, token: Token, finish_reason: str | None = None) -> None:
        """Append a token. The last token has a `finish_reason`."""
        self.tokens.append(token)
        self.cumulative_log_prob += token.log_prob or 0.0
        self.finish_reason = finish_reason

    @property
    def num_taken(self) -> int:
        """The number of tokens that `get_next_token` has returned."""
        return self._taken

    def has_next_token(self) -> bool:
        return self._taken < len(self.tokens)

    def get_next_token(self) -> tuple[Any, ...]:
        """Return the next token, its index, whether it is the first token, and whether it is the last token.

        If there is no next token, the result is (None, 0, False, False). Without `with_index`, the index is omitted.
        """
        token, *details = self._next()
        return (token, *details) if self._with_index else (token, *details[1:])

    def _next(self) -> tuple[Token | None, int, bool, bool]:
        if not self.has_next_token():
            return None, 0, False, False
        index = self._taken
        self._taken += 1
        last = self.finish_reason is not None and index == len(self.tokens) - 1
        return self.tokens[index], index, index == 0, last

    def get_last_token(self) -> Token | None:
        """Return the last token of a finished sequence, or None if the sequence is not finished."""
        return self.tokens[-1] if self.finish_reason is not None and self.tokens else None

    def has_next_top_tokens(self) -> bool:
        return self._top_taken < len(self.top_tokens)

    def get_next_top_tokens(self) -> list[Token] | None:
        """Return the alternatives to the next token, or None if there are no more tokens."""
        if not self.has_next_top_tokens():
            return None
        self._top_taken += 1
        return self.top_tokens[self._top_taken - 1]


@dataclass
class RequestInput:
    """A client request. Subclasses may add fields for the output formatter.

    Attributes:
        request_id: a number that is unique in the process. The handler sets it.
        parameters: the `parameters` of the body, which may include `stream`.
        tgi_compat: whether `option.tgi_compat` is set. The handler sets it.
        session: the session of the client, or None if there is none. The handler sets it.
    """

    request_id: int | None = None
    client_request_id: str | None = None
    output_formatter: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] = field(default_factory=dict)
    tgi_compat: bool = False
    session: Session | None = field(default=None, kw_only=True)


@dataclass
class TextInput(RequestInput):
    """A request with a prompt.

    Attributes:
        input_text: the prompt, or a list of prompts in dynamic batching.
    """

    input_text: Any = None
    input_ids: list[int] | None = None
    adapters: Any = None
    tokenizer: Any = None


@dataclass
class RequestOutput:
    request_id: int
    input: Any
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """The output that a request has produced so far.

    Attributes:
        sequences: the sequences by index. There are several sequences if the request sets `n`, `best_of` or
            `num_beams`.
        best_sequence_index: the index of the best sequence, which may change until `finished` is true.
        prompt_tokens_details: the tokens of the prompt, if the request sets `decoder_input_details`.
        other_sequences_indices: the indices of the other sequences to return, in order of decreasing probability. They
            are set when `finished` is true.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = field(default_factory=list)
    other_sequences_indices: list[int] = field(default_factory=list)

    def get_tokens_as_dict(self, sequence_index: int = 0) -> list[dict[str, Any]]:
        return self._as_dicts(self.sequences[sequence_index].tokens)

    def get_prompt_tokens_as_dict(self) -> list[dict[str, Any]]:
        return self._as_dicts(self.prompt_tokens_details)

    def get_top_tokens_as_dict(self, sequence_index: int = 0) -> list[list[dict[str, Any]]]:
        return [self._as_dicts(tokens) for tokens in self.sequences[sequence_index].top_tokens]

    def _as_dicts(self, tokens: list[Token]) -> list[dict[str, Any]]:
        if getattr(self.input, "tgi_compat", False):
            return [token.as_tgi_dict() for token in tokens]
        return [token.as_dict() for token in tokens]


class Response(dict[str, Any]):
    """A complete response in OpenAI's format. It is a dict whose fields, at every level, are also attributes.

    It replaces vLLM's response objects, and provides their methods `model_dump` and `model_dump_json`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({name: _with_attributes(value) for name, value in fields.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the response has no field {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)  # raises an AttributeError if there is no such field
        del self[name]

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return the response as plain dicts and lists. Other arguments of the pydantic method are ignored."""
        dumped: dict[str, Any] = _dumped(self, exclude_none)
        return dumped

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False, **_: Any) -> str:
        separators = (",", ":") if indent is None else None
        value = self.model_dump(exclude_none=exclude_none)
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return Response(value)
    return [_with_attributes(member) for member in value] if isinstance(value, list) else value


def _dumped(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, dict):
        members = {name: member for name, member in value.items() if member is not None or not exclude_none}
        return {name: _dumped(member, exclude_none) for name, member in members.items()}
    return [_dumped(member, exclude_none) for member in value] if isinstance(value, list | tuple) else value


F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """Mark a function as an input formatter, which reads request bodies."""
    vars(function)["is_input_formatter"] = True
    return function


def output_formatter(function: F) -> F:
    """Mark a function as an output formatter, which writes responses."""
    vars(function)["is_output_formatter"] = True
    return function


class Content(dict[str, bytes]):
    """The parts of a body by name. For formatters, the only part is `data`."""

    def get_keys(self) -> list[str]:
        return list(self)

    def get_values(self) -> list[bytes]:
        return list(self.values())

    def size(self) -> int:
        return len(self)

    def is_empty(self) -> bool:
        return not self

    def key_at(self, index: int) -> str:
        return self.get_keys()[index]

    def value_at(self, index: int) -> bytes:
        return self.get_values()[index]


class Input:
    """A request.

    Args:
        body: the body of the request.
        properties: the HTTP headers of the request, with names in lower case.
        session: the client's session, or None if it has none.
    """

    def __init__(
        self, body: bytes = b"", properties: Mapping[str, str] | None = None, session: Session | None = None
    ) -> None:
        self.properties: dict[str, Any] = dict(properties or {})
        self.content = Content(data=body)
        self.function_name = "handle"
        self.session = session

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str) -> Any:
        """Return the value of a header, or None if it is missing. The name is case-insensitive."""
        lower = key.lower()
        return next((value for name, value in self.properties.items() if name.lower() == lower), None)

    def get_content(self) -> Content:
        return self.content

    def contains_key(self, key: str) -> bool:
        return key in self.content

    def get_as_bytes(self, key: str | None = None) -> Any:
        """Return a part of the body, by default `data` or else the first part. Return None if the body has no parts."""
        if self.content.is_empty():
            return None
        if key and key not in self.content:
            raise KeyError(f"the request has no content {key!r}")
        return self.content[key or ("data" if "data" in self.content else next(iter(self.content)))]

    def get_as_string(self, key: str | None = None) -> str:
        text: str = self.get_as_bytes(key).decode()
        return text

    def get_as_json(self, key: str | None = None) -> Any:
        return json.loads(self.get_as_string(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(self.get_as_string(key))))

    def get_as_npz(self, key: str | None = None) -> list[Any]:
        with importlib.import_module("numpy").load(io.BytesIO(self.get_as_bytes(key))) as arrays:
            return [arrays[name] for name in arrays.files]

    def get_as_numpy(self, key: str | None = None) -> list[Any]:
        return from_nd_list(self.get_as_bytes(key))

    def get_as_image(self, key: str | None = None) -> Any:
        return importlib.import_module("PIL.Image").open(io.BytesIO(self.get_as_bytes(key)))

    def get_data(self, key: str | None = None) -> Any:
        """Return the body as JSON, an image, NumPy arrays, text or bytes, depending on its content type."""
        media = self.get_property("content-type") or ""
        if media.startswith("application/json"):
            return self.get_as_json(key)
        if media.startswith("image/"):
            return self.get_as_image(key)
        if media.startswith("tensor/"):
            return self.get_as_npz(key) if media == "tensor/npz" else self.get_as_numpy(key)
        return self.get_as_string(key) if media.startswith("text/") else self.get_as_bytes(key)

    def get_function_name(self) -> str:
        return self.function_name

    def is_empty(self) -> bool:
        return self.content.is_empty()

    def is_batch(self) -> bool:
        return False

    def get_batch_size(self) -> int:
        return 1

    def get_batches(self) -> list[Input]:
        return [self]

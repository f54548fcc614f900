"""The values that the dialects for decisions share: questions, their options, and paths in a request body."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.protocols.kernel.readers import show


class Kind(str, Enum):
    """The type of a question. The values are those of System One."""

    NOUL = "noul"  # whether something is true
    CHOICE = "choice"
    SCORE = "score"


class InvalidField(InvalidPayload):
    """Raised for an invalid field of a body.

    Attributes:
        reason: the message without the path of the field.
        keys: the path of the field.
        type: pydantic's type of the error, which SGLang's clients read.
    """

    def __init__(self, path: Path, reason: str, type: str = "value_error") -> None:
        super().__init__(f"{path}: {reason}" if path.keys else reason)
        self.reason = reason
        self.keys = path.keys
        self.type = type

    @property
    def public(self) -> str:
        """The path up to the first name of a question, option or asset, which is text from the client."""
        is_listed = len(self.keys) > 1 and isinstance(self.keys[1], int)
        path = Path(self.keys if is_listed else self.keys[:1])
        return f"{path} was refused" if self.keys else self.message


_SHOWN = 64  # characters of a client's name in a path


class Path(NamedTuple):
    """The path of a value in a request body, for error messages: names of fields, and indices of lists."""

    keys: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        text = "".join(f"[{key}]" if isinstance(key, int) else f".{key[:_SHOWN]}" for key in self.keys)
        return text.removeprefix(".")

    def at(self, *keys: str | int) -> Path:
        """Return the path of a member of the value."""
        return Path((*self.keys, *keys))

    def refused(self, reason: str) -> InvalidField:
        return InvalidField(self, reason)

    def only(self, names: Iterable[str], known: Collection[str], reason: str) -> None:
        """Check the names of the value's members.

        Raises:
            InvalidField: a name is not in `known`. The message is `reason`.
        """
        for name in names:
            if name not in known:
                raise InvalidField(self.at(name), reason, "extra_forbidden")

    def missing(self, remedy: str) -> InvalidField:
        return InvalidField(self, f"is missing; {remedy}", "missing")


def check_name(name: str, path: Path) -> None:
    """Check the name of an option, which is part of a line of the prompt.

    Raises:
        InvalidField: the name is blank, or has a control character or a line break.
    """
    if not name.strip():
        raise path.refused("the name of an option must not be blank")
    if not name.isprintable() and _CONTROL.search(name):
        raise path.refused("the name of an option must not have control characters or line breaks")


def check_type(question: Mapping[str, Any], kinds: Collection[str], path: Path, *, reason: str = "") -> str:
    """Return the type of a question.

    Args:
        kinds: the types that the API has.
        path: the path of the question.
        reason: why a type of the API is not supported, instead of the supported types.

    Raises:
        InvalidField: the type is missing or not supported.
    """
    supported, kind = f"must be {' or '.join(kinds)}", question.get("type")
    if isinstance(kind, str) and kind in kinds:
        return kind
    if "type" not in question:
        raise path.at("type").missing(f"it {supported}")
    raise path.at("type").refused(f"{show(kind)} is not supported: {reason or supported}")


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Option(NamedTuple):
    """An option of a question. For true and false of System One, `name` is empty."""

    name: str
    description: str = ""


class Question(NamedTuple):
    """A question about the state.

    Attributes:
        path: the path of the question in the body.
        name: the client's id or name, or None if it has none.
        instructions: the text of the question, which may be empty.
        options: the options: true and false, the choices, or the levels of a score from the lowest to the highest.
        media: images that belong only to this question, and precede its text.
        values: what the response calls the options, if it repeats them.
        lettered: whether letters label the options, whatever the type of the question.
    """

    path: Path
    name: str | None
    kind: Kind
    instructions: str
    options: tuple[Option, ...]
    media: tuple[MediaSource, ...] = ()
    values: tuple[Any, ...] = ()
    lettered: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The names of the options without the quotes that distinguish strings from booleans in OpenAI's API."""
        if not self.values:
            return tuple(option.name for option in self.options)
        return tuple(value if isinstance(value, str) else json.dumps(value) for value in self.values)

    @property
    def form(self) -> Kind:
        """The type of the question in the prompt."""
        return Kind.CHOICE if self.lettered else self.kind

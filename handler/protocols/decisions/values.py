"""The values that the dialects for decisions share: questions, their options, and paths in a request body."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, NamedTuple

from handler.core.media import MediaSource
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import string


class Kind(str, Enum):
    """The type of a question. The values are those of System One."""

    NOUL = "noul"  # whether something is true
    CHOICE = "choice"
    SCORE = "score"


def option_name(value: Any) -> str:
    """Read the name of an option, which is part of a line of the prompt."""
    name = string(value)
    if not name.strip():
        raise ValueError("the name of an option must not be blank")
    if not name.isprintable() and _CONTROL.search(name):
        raise ValueError("the name of an option must not have control characters or line breaks")
    return name


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

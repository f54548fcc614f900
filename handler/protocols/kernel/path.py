"""Paths of values in request bodies, and the error for a value that is refused: a path and a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from handler.core.errors import InvalidParameter, InvalidPayload


class InvalidField(InvalidPayload):
    """Raised for an invalid field of a body.

    Attributes:
        reason: the message without the path of the field.
        keys: the path of the field.
        type: pydantic's type of the error, which SGLang's clients read.
    """

    def __init__(self, path: Path, reason: str, type: str = "value_error") -> None:
        super().__init__(path.words(path, reason) if path.keys else reason)
        self.reason = reason
        self.keys = path.keys
        self.type = type

    @property
    def public(self) -> str:
        """The path up to the first name that is text from the client, such as that of a question."""
        is_listed = len(self.keys) > 1 and isinstance(self.keys[1], int)
        path = Path(self.keys if is_listed else self.keys[:1])
        return f"{path} was refused" if self.keys else self.message


_SHOWN = 64  # characters of a client's name in a path


def _with_colon(path: Path, reason: str) -> str:
    return f"{path}: {reason}"


def in_quotes(path: Path, reason: str) -> str:
    """Return the error for a member of a parameter. A reason that begins with "has" or "must have" is complete."""
    return reason if reason.startswith(("has ", "must have ")) else f"'{path}' {reason}"


class Path(NamedTuple):
    """The path of a value in a request body, for error messages: names of fields, and indices of lists.

    Attributes:
        words: returns the error message for a path and a reason.
    """

    keys: tuple[str | int, ...] = ()
    words: Callable[[Path, str], str] = _with_colon

    def __str__(self) -> str:
        return _join([f"[{key}]" if isinstance(key, int) else f".{key[:_SHOWN]}" for key in self.keys])

    @property
    def general(self) -> str:
        """The path without indices, such as `input[].content[]`."""
        return _join(["[]" if isinstance(key, int) else f".{key[:_SHOWN]}" for key in self.keys])

    def at(self, *keys: str | int) -> Path:
        """Return the path of a member of the value."""
        before, words = self
        return tuple.__new__(type(self), ((*before, *keys), words))  # in half the time of the constructor

    def refused(self, reason: str) -> InvalidField | InvalidParameter:
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


class ParameterPath(Path):
    """The path of a value in a parameter. It is refused as a parameter is."""

    def refused(self, reason: str) -> InvalidParameter:
        return InvalidParameter(self.words(self, reason))


def _join(keys: Iterable[str]) -> str:
    return "".join(keys).removeprefix(".")

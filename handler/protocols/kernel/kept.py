"""Answers that are kept, so that later requests go on from them: what dialects say of them, and what they get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import dumps

Kind = Literal["response", "thread"]
"""An answer of the Responses API, or one in a thread of Anthropic's."""


class Wanted(NamedTuple):
    """What a body needs of the answers that are kept.

    Attributes:
        keeps: its own answer is to be kept.
        previous: the id of the answer that it goes on from; "" for none.
        items: ids of single items that it names.
    """

    kind: Kind
    keeps: bool
    previous: str = ""
    items: Sequence[str] = ()


State = Literal["found", "missing", "broken", "in_progress", "failed", "too_long"]


class Recalled(NamedTuple):
    """What was kept of it.

    Attributes:
        state: of the answer that the body goes on from; "broken": one before it is not kept any more.
        head: what the first answer of the conversation was kept with.
        history: the items of all answers before, each one's input and then its output.
        items: those that the body names and that are kept, by id.
        size: bytes of it all.
    """

    state: State = "found"
    head: Mapping[str, Any] = MappingProxyType({})
    history: Sequence[Any] = ()
    items: Mapping[str, Any] = MappingProxyType({})
    size: int = 0


NOTHING = Recalled()


def too_long(field: object, what: str, most: int) -> InvalidParameter:
    """Return the error for more that was kept than a request may bring in.

    Args:
        field: the body's, with its value.
        what: it names.
        most: bytes.
    """
    return InvalidParameter(f"{field}: {what} have more than {most} bytes (max_request_size)")


class KeptItem(NamedTuple):
    """An item of a request, as JSON."""

    id: str
    json: bytes


def kept_items(items: Iterable[Mapping[str, Any]]) -> list[KeptItem]:
    """Return items as they are kept.

    Raises:
        InvalidPayload: one can be read, but not written.
    """
    try:
        return [KeptItem(_id(item), dumps(item)) for item in items]
    except TypeError as error:
        raise InvalidPayload(f"the request cannot be stored: {error}") from None


def _id(item: Mapping[str, Any]) -> str:
    id = item.get("id")
    return id if isinstance(id, str) else ""


class KeptAnswer(NamedTuple):
    """An answer to keep.

    Attributes:
        previous: the id of the answer before; "" for none.
        failed: nothing can go on from it.
        head: what is not its items.
        given: the items of its request.
        output: its own.
    """

    id: str
    kind: Kind
    previous: str
    failed: bool
    head: Mapping[str, Any]
    given: Sequence[KeptItem]
    output: Sequence[Mapping[str, Any]]


class Keeper(Protocol):
    """Keeps one client's answers."""

    def begin(self, id: str, answer: Mapping[str, Any]) -> object:
        """Note an answer in progress, for as long as what it returns is held."""

    def keep(self, answer: KeptAnswer) -> bool:
        """Keep an answer that has ended; return whether it is kept. It blocks."""


class Keeping:
    """Keeps one answer, for the reply that writes it.

    Args:
        given: the request's own items.
    """

    def __init__(self, keeper: Keeper, kind: Kind, previous: str, given: Sequence[KeptItem]) -> None:
        self._keeper, self._kind, self._previous, self._given = keeper, kind, previous, given
        self._in_progress: object = None

    def begin(self, id: str, answer: Mapping[str, Any]) -> None:
        """Note that the answer has begun."""
        self._in_progress = self._keeper.begin(id, answer)

    def end(
        self, id: str, head: Mapping[str, Any], output: Sequence[Mapping[str, Any]], *, failed: bool = False
    ) -> bool:
        """Keep the answer, which has ended; return whether it is kept. It blocks."""
        kept = self._keeper.keep(KeptAnswer(id, self._kind, self._previous, failed, head, self._given, output))
        self._in_progress = None
        return kept

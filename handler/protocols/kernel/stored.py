"""The stored responses that later requests may continue: what a body refers to, and what a reply stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from handler.core.errors import InvalidParameter, InvalidPayload
from handler.core.framing import dumps

Kind = Literal["response", "thread", "background"]
"""The API of a stored response: "response" for the Responses API, "thread" for threads in Anthropic's API. "background"
is a background response with `store=false`, which clients can poll for some time, but not continue.
"""

CONVERSATION = "conv_"
"""The prefix of ids of conversations, which ids of responses do not have."""


class Wanted(NamedTuple):
    """The stored responses that a body refers to.

    Attributes:
        keeps: whether the response to the body should be stored.
        previous: the id of the response that the body continues, or "" if it continues none.
        items: the ids of individual stored items that the body refers to.
        conversation: the id of the conversation to which the body belongs, or "".
        appends: whether the response is appended to the conversation.
        detaches: whether the response is generated in the background, and stored after the request has ended.
    """

    kind: Kind
    keeps: bool
    previous: str = ""
    items: Sequence[str] = ()
    conversation: str = ""
    appends: bool = False
    detaches: bool = False


State = Literal["found", "missing", "broken", "in_progress", "failed", "too_long", "in_conversation"]


class Recalled(NamedTuple):
    """The stored responses and items for a request.

    Attributes:
        state: the state of the response that the body continues. "broken" means that an earlier response of the
            conversation is no longer stored, and "in_conversation" that a stored conversation contains the response.
        head: the fields that were stored with the first response of the conversation.
        history: the items of all earlier responses: the input of a response, then its output.
        items: the stored items that the body refers to, by id.
        size: the total size of these values in bytes.
    """

    state: State = "found"
    head: Mapping[str, Any] = MappingProxyType({})
    history: Sequence[Any] = ()
    items: Mapping[str, Any] = MappingProxyType({})
    size: int = 0


NOTHING = Recalled()


def too_long(field: object, subject: str, most: int) -> InvalidParameter:
    """Return the error for stored values that exceed the maximum request size.

    Args:
        field: the field of the body that refers to the stored values, with its value.
        subject: a plural noun for the stored values.
        most: the maximum size in bytes.
    """
    return InvalidParameter(f"{field}: {subject} exceed {most} bytes (max_request_size)")


KeptItem = tuple[str, bytes]
"""The id of an item in a request, and the item encoded as JSON."""


def kept_items(items: Iterable[Mapping[str, Any]]) -> list[KeptItem]:
    """Encode items for storage.

    Raises:
        InvalidPayload: an item cannot be encoded as JSON.
    """
    try:
        return [(_id(item), dumps(item)) for item in items]
    except TypeError as error:
        raise InvalidPayload(f"the request cannot be stored: {error}") from None


def _id(item: Mapping[str, Any]) -> str:
    id = item.get("id")
    return id if isinstance(id, str) else ""


class KeptResponse(NamedTuple):
    """A response to store.

    Attributes:
        previous: the id of the response that this response continues, or "" if it continues none.
        failed: whether the response failed, in which case no request can continue it.
        head: the fields of the response other than its items.
        given: the items of the request.
        output: the items of the response.
        stored: whether to store the response itself, or only to append its items to its conversation.
    """

    id: str
    kind: Kind
    previous: str
    failed: bool
    head: Mapping[str, Any]
    given: Sequence[KeptItem]
    output: Sequence[Mapping[str, Any]]
    stored: bool = True


class Keeper(Protocol):
    """Stores the responses of one client."""

    def begin(self, id: str, response: Mapping[str, Any]) -> None:
        """Record that a response is in progress until it is stored or its request ends."""

    def keep(self, response: KeptResponse) -> bool:
        """Store a finished response, and append it to its conversation unless it failed. This call blocks.

        Returns:
            Whether the response was stored.

        Raises:
            ServingError: the response could not be appended to its conversation. Nothing has changed.
        """


class Detached:
    """A response that is generated in the background, while its client polls it or reads its events.

    It implements `Keeper`: its reply passes the response to it, and its host stores the response.

    Args:
        queued: the response that is stored until it has ended.
        events: its first events, each framed.
        streams: whether clients may read its events.

    Attributes:
        response: the newest state of the response.
    """

    def __init__(self, queued: KeptResponse, events: Sequence[bytes], *, streams: bool) -> None:
        self.queued = queued
        self.events = events
        self.streams = streams
        self.response: Mapping[str, Any] = {**queued.head, "output": ()}

    def begin(self, id: str, response: Mapping[str, Any]) -> None:
        self.response = response

    def keep(self, response: KeptResponse) -> bool:
        self.response = {**response.head, "output": response.output}
        return True


class Keeping:
    """Stores the response that a reply writes.

    Args:
        previous: the id of the response that this response continues, or of its conversation, or "" if it continues
            none.
        items: the items of the request.
        stores: whether the response itself is stored, or only its items in its conversation.
    """

    def __init__(
        self, keeper: Keeper, kind: Kind, previous: str, items: Sequence[KeptItem], *, stores: bool = True
    ) -> None:
        self._keeper, self._kind, self._previous, self._given = keeper, kind, previous, items
        self._stores = stores

    def detach(
        self, id: str, kind: Kind, head: Mapping[str, Any], events: Sequence[bytes], *, streams: bool
    ) -> Detached:
        """Return a background response, to which the reply passes its response from now on.

        Args:
            head: the fields of the response while it is queued.
            events: its first events, each framed.
            streams: whether clients may read its events.
        """
        queued = KeptResponse(id, kind, self._previous, False, head, self._given, ())
        self._keeper = detached = Detached(queued, events, streams=streams)
        return detached

    def begin(self, id: str, response: Mapping[str, Any]) -> None:
        """Record that the response is in progress."""
        if self._stores:
            self._keeper.begin(id, response)

    def end(
        self, id: str, head: Mapping[str, Any], output: Sequence[Mapping[str, Any]], *, failed: bool = False
    ) -> bool:
        """Store the finished response, as `Keeper.keep` does, and return whether it was stored."""
        return self._keeper.keep(
            KeptResponse(id, self._kind, self._previous, failed, head, self._given, output, self._stores)
        )

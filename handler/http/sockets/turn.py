"""The responses of a realtime session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from handler.core.framing import loads
from handler.core.values import new_digits
from handler.http.sockets.base import Socket
from handler.http.sockets.exchange import EventSender

Send = Callable[..., None]
"""Sends an event of the server, from its type and its fields."""

_CREATED, _IN_PROGRESS = b'{"type":"response.created"', b'{"type":"response.in_progress"'
"""The beginnings of two events that repeat the settings. They may be large, and are not needed here."""

_TEXTS = {
    "message": ("output_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Maps the types of items that are sent to the name of their text in types of events, and to its field there."""


class _OpenItem(NamedTuple):
    """The item that a response is generating.

    Attributes:
        item: the item, as it was sent when it began.
        common: the fields that each event about its text repeats.
        pieces: its text so far.
    """

    item: dict[str, Any]
    common: dict[str, Any]
    pieces: list[str]


class TextTurn(EventSender):
    """Sends a response of /v1/responses in realtime events.

    The events of every response begin with `response.created`. However it ends, what has begun ends before
    `response.done`.

    Args:
        send: sends an event.
        settings: settings of the session, with those of the response.
        metadata: metadata of the response, as JSON.
        conversation_id: id of the conversation that the items are added to, or None.
        put: adds an item to the conversation when it begins ("added"), replaces it when it ends ("done"), and sends
            the event of the conversation. A client may send the output of a call before the end of the response.

    Attributes:
        id: id of the response.
        is_over: whether `response.done` has been sent.
    """

    def __init__(
        self,
        socket: Socket,
        send: Send,
        settings: Mapping[str, Any],
        metadata: object,
        conversation_id: str | None = None,
        put: Callable[[str, dict[str, Any]], None] = lambda kind, item: None,
    ) -> None:
        super().__init__(socket)
        self._send = send
        self._settings = settings
        self._metadata = metadata
        self._put = put
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._has_begun = False
        self.conversation_id = conversation_id
        self.id = f"resp_{new_digits()}"
        self.is_over = False

    def cancel(self) -> None:
        """End the response."""
        self._end("cancelled", {"type": "cancelled", "reason": "client_cancelled"})
        self.disconnect()

    def close(self) -> None:
        """End the response if it has not ended, such as one of custom code that breaks off."""
        self.error({"status": 500, "message": "the response broke off"})

    def event(self, event: bytes) -> None:
        if self.is_over or event.startswith(_IN_PROGRESS):
            return
        if event.startswith(_CREATED):
            self._begin()
        else:
            self._translate(loads(event))

    def error(self, event: dict[str, Any]) -> None:
        if self.is_over:
            return
        error = event.get("error", event)
        kind = "invalid_request_error" if event["status"] < 500 else "server_error"
        failure = {"type": kind, "code": error.get("code"), "message": error.get("message")}
        self._end("failed", {"type": "failed", "error": failure})

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._send("response.created", response=self._response("in_progress"))

    def _translate(self, event: Mapping[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            self._begin_item(event["item"])
        elif kind == "output_item.done":
            self._end_item(event["item"]["status"])
        elif kind in ("completed", "incomplete", "failed"):
            response = event["response"]
            self._end(kind, _details(response), response["usage"])
        elif kind.endswith(".delta") and self._open is not None:
            self._open.pieces.append(event["delta"])
            self._send(event["type"], **self._open.common, delta=event["delta"])

    def _begin_item(self, item: dict[str, Any]) -> None:
        """Send the events that begin an item, unless realtime clients do not know its type, such as reasoning."""
        if item["type"] not in _TEXTS:
            return
        common = {"response_id": self.id, "item_id": item["id"], "output_index": len(self._items)}
        if item["type"] == "message":
            common["content_index"] = 0
        else:
            common |= {"call_id": item["call_id"], "name": item["name"]}
        self._open = _OpenItem({**item, "object": "realtime.item"}, common, [])
        self._send_item("added", self._open.item)
        if item["type"] == "message":
            self._send("response.content_part.added", **common, part={"type": "text", "text": ""})

    def _end_item(self, status: str) -> None:
        """Send the events that end the open item, if there is one."""
        if self._open is None:
            return
        (item, common, pieces), self._open = self._open, None
        (name, field), text = _TEXTS[item["type"]], "".join(pieces)
        self._send(f"response.{name}.done", **common, **{field: text})
        if item["type"] == "message":
            self._send("response.content_part.done", **common, part={"type": "text", "text": text})
            item = {**item, "status": status, "content": [{"type": "output_text", "text": text}]}
        else:
            item = {**item, "status": status, field: text}
        self._send_item("done", item)
        self._items.append(item)

    def _send_item(self, kind: str, item: dict[str, Any]) -> None:
        self._send(f"response.output_item.{kind}", response_id=self.id, output_index=len(self._items), item=item)
        self._put(kind, item)

    def _end(self, status: str, details: object, usage: Mapping[str, Any] | None = None) -> None:
        self._begin()
        self._end_item("incomplete")
        self.is_over = True
        self._send("response.done", response=self._response(status, details, usage))

    def _response(self, status: str, details: object = None, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        limit = self._settings.get("max_output_tokens") or "inf"
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": self._items,
            "conversation_id": self.conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": limit,
            "metadata": self._metadata,
            "usage": None if usage is None else _usage(usage),
        }


def _details(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `status_details` for a response of /v1/responses that has ended."""
    if response["status"] == "incomplete":
        return {"type": "incomplete", "reason": (response["incomplete_details"] or {}).get("reason")}
    if response["status"] == "failed":
        return {"type": "failed", "error": {"type": "server_error", **response["error"]}}
    return None


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    num_in, num_out = usage["input_tokens"], usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    details = {"text_tokens": num_in, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": cached}
    return {
        "total_tokens": num_in + num_out,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "input_token_details": details,
        "output_token_details": {"text_tokens": num_out, "audio_tokens": 0},
    }

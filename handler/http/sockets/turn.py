"""The responses of a realtime session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handler.core.framing import loads
from handler.core.values import new_digits
from handler.http.sockets.base import Socket
from handler.http.sockets.exchange import EventSender

Send = Callable[..., None]
"""Sends an event of the server, from its type and its fields."""

_OF_RESPONSES = ("type", "sequence_number", "logprobs", "part")
"""The fields of /v1/responses events that realtime events lack, or have with other values."""


_CREATED, _IN_PROGRESS = b'{"type":"response.created"', b'{"type":"response.in_progress"'
"""The beginnings of two events that repeat the settings. They may be large, and are not needed here."""


class TextTurn(EventSender):
    """Sends a response of /v1/responses in realtime events.

    Args:
        send: sends an event.
        settings: settings of the session, with those of the response.
        metadata: metadata of the response, as JSON.

    Attributes:
        id: id of the response.
        is_over: whether `response.done` has been sent.
    """

    conversation_id: str | None = None

    def __init__(self, socket: Socket, send: Send, settings: Mapping[str, Any], metadata: object) -> None:
        super().__init__(socket)
        self._send = send
        self._settings = settings
        self._metadata = metadata
        self._hidden = set[int]()  # output indices of the items that are not sent, such as reasoning
        self._items: list[dict[str, Any]] = []
        self._calls: dict[int, dict[str, str]] = {}  # fields that each event of a function call repeats, by index
        self.id = f"resp_{new_digits()}"
        self.is_over = False

    def cancel(self) -> None:
        """End the response."""
        self._done("cancelled", {"type": "cancelled", "reason": "client_cancelled"})
        self.disconnect()

    def event(self, event: bytes) -> None:
        if event.startswith(_CREATED):
            event = _CREATED + b"}"
        if not (self.is_over or event.startswith(_IN_PROGRESS)):
            self._translate(loads(event))

    def error(self, event: dict[str, Any]) -> None:
        if self.is_over:
            return
        error = event.get("error", event)
        kind = "invalid_request_error" if event["status"] < 500 else "server_error"
        if not self._items:
            self._begin()
        self._done(
            "failed",
            {"type": "failed", "error": {"type": kind, "code": error.get("code"), "message": error.get("message")}},
        )

    def _begin(self) -> None:
        self._send("response.created", response=self._response("in_progress"))

    def _translate(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        if kind == "created":
            return self._begin()
        if kind in ("completed", "incomplete", "failed"):
            return self._end(event["response"])
        if event.get("output_index") in self._hidden or kind == "in_progress":
            return
        if kind.startswith("output_item"):
            return self._item(kind, event)
        fields = {name: value for name, value in event.items() if name not in _OF_RESPONSES}
        if "output_index" in event:
            fields["output_index"] = self._index(event)
        if kind.startswith("function_call_arguments"):
            fields.update(self._calls[event["output_index"]])
        if "part" in event:
            fields["part"] = {"type": "text", "text": event["part"]["text"]}
        self._send(event["type"], response_id=self.id, **fields)

    def _item(self, kind: str, event: dict[str, Any]) -> None:
        if event["item"]["type"] == "reasoning":
            self._hidden.add(event["output_index"])
            return
        item = _output_item(event["item"])
        if item["type"] == "function_call":
            self._calls[event["output_index"]] = {"call_id": item["call_id"], "name": item["name"]}
        self._send_item(kind, self._index(event), item)

    def _index(self, event: Mapping[str, Any]) -> int:
        """Return the index of an event's item among the items that are sent."""
        index: int = event["output_index"]
        return index - sum(hidden < index for hidden in self._hidden)

    def _send_item(self, kind: str, index: int, item: dict[str, Any]) -> None:
        self._send(f"response.{kind}", response_id=self.id, output_index=index, item=item)
        if kind == "output_item.done":
            self._items.append(item)

    def _end(self, response: Mapping[str, Any]) -> None:
        details = None
        if response["status"] == "incomplete":
            reason = (response["incomplete_details"] or {}).get("reason", "interrupted")
            details = {"type": "incomplete", "reason": reason}
        elif response["status"] == "failed":
            details = {"type": "failed", "error": {"type": "server_error", **response["error"]}}
        self._done(response["status"], details, response["usage"])

    def _done(self, status: str, details: object = None, usage: Mapping[str, Any] | None = None) -> None:
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


class ConversationTurn(TextTurn):
    """Sends a response whose items are added to the conversation.

    Args:
        conversation_id: id of the conversation.
        add: adds an item to the conversation, as soon as it is complete. A client may send the output of a call at
            once, before the end of the response.
    """

    def __init__(
        self,
        socket: Socket,
        send: Send,
        settings: Mapping[str, Any],
        metadata: object,
        conversation_id: str,
        add: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(socket, send, settings, metadata)
        self.conversation_id = conversation_id
        self._add = add

    def _send_item(self, kind: str, index: int, item: dict[str, Any]) -> None:
        super()._send_item(kind, index, item)
        if kind == "output_item.done":
            self._add(item)
        self._send(f"conversation.item.{kind.removeprefix('output_item.')}", previous_item_id=None, item=item)


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


def _output_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of a response as realtime clients read it."""
    fields = {**item, "object": "realtime.item"}
    if item["type"] == "message":
        fields["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return fields

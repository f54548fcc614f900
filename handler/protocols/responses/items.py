"""Output items from the events of an assistant's answer, and the stream's events about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from handler.core.identifiers import new_digits, new_secret
from handler.protocols.assistant.events import Arguments, CallStart, Event, Reasoning
from handler.protocols.responses.answers import (
    CallItem,
    CallPlace,
    Delta,
    MessageItem,
    OpenAiResponseEvent,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseItem,
    Status,
    TextPlace,
)


def new_id(prefix: str) -> str:
    return f"{prefix}_{new_digits()}"


def secret_id(prefix: str) -> str:
    """Return the id of what is kept, and can be read by it."""
    return f"{prefix}_{new_secret()}"


class Items:
    """Builds one answer's items, in order. White space alone is no message beside other items.

    Args:
        namespaces: a tool's name in the prompt -> its namespace and its name there.
        most_calls: how many are left in, the first ones; None: all.
        secret: nobody can guess the items' ids.

    Attributes:
        output: the items so far; the last one may be open.
        open: the last item, while it is open.
        parts: the pieces of its text.
        broken: a call is not whole.
    """

    def __init__(
        self, namespaces: Mapping[str, tuple[str, str]], most_calls: int | None = None, *, secret: bool = False
    ) -> None:
        self._namespaces = namespaces
        self._most_calls = most_calls
        self._new_id = secret_id if secret else new_id
        self._space = ""
        self._numbers = 0
        self.output: list[ResponseItem] = []
        self.open: ResponseItem | None = None
        self.parts: list[str] = []
        self.broken = False

    def number(self) -> int:
        """Return the number of the next event."""
        self._numbers += 1
        return self._numbers - 1

    def feed(self, events: Iterable[Event]) -> list[OpenAiResponseEvent]:
        found: list[OpenAiResponseEvent] = []
        for event in events:
            if isinstance(event, str):
                self._text(event, found)
            elif isinstance(event, Reasoning):
                if self.open is None or self.open["type"] != "reasoning":
                    self._begin(self._reasoning(), found)
                self._add(event.text, found)
            elif self._most_calls is not None and event.number >= self._most_calls:
                continue
            elif isinstance(event, CallStart):
                namespace, name = self._namespaces.get(event.name, ("", event.name))
                self._begin(self._call(namespace, name), found)
            elif isinstance(event, Arguments):
                self._add(event.text, found)
            else:
                self.broken |= not event.whole
                self._close(found, status="completed" if event.whole else "incomplete")
        return found

    def end(self, *, complete: bool) -> list[OpenAiResponseEvent]:
        """Return the events of the last item's end."""
        found: list[OpenAiResponseEvent] = []
        if self._space and not self.output:
            space = self._space
            self._begin(self._message(), found)
            self._add(space, found)
        self._close(found, status="completed" if complete else "incomplete")
        return found

    def delta(self, item: ResponseItem, text: str, number: int) -> Delta:
        """Return a delta of the open item."""
        if item["type"] == "message":
            return {
                "type": "response.output_text.delta",
                "sequence_number": number,
                **self._place(item),
                "delta": text,
                "logprobs": [],
            }
        if item["type"] == "reasoning":
            return {
                "type": "response.reasoning_text.delta",
                "sequence_number": number,
                **self._place(item),
                "delta": text,
            }
        return {
            "type": "response.function_call_arguments.delta",
            "sequence_number": number,
            **self._call_place(item),
            "delta": text,
        }

    def _call_place(self, item: ResponseItem) -> CallPlace:
        return {"item_id": item["id"], "output_index": len(self.output) - 1}

    def _place(self, item: ResponseItem) -> TextPlace:
        """Return where an event about the text of the open item belongs."""
        return {**self._call_place(item), "content_index": 0}

    def _text(self, text: str, found: list[OpenAiResponseEvent]) -> None:
        if self.open is None or self.open["type"] != "message":
            self._space += text
            if not self._space.strip():
                return
            text = self._space
            self._begin(self._message(), found)
        self._add(text, found)

    def _begin(self, item: ResponseItem, found: list[OpenAiResponseEvent]) -> None:
        self._close(found)
        self.open, self._space, self.parts = item, "", []
        self.output.append(item)
        index = len(self.output) - 1
        found.append(
            {
                "type": "response.output_item.added",
                "sequence_number": self.number(),
                "output_index": index,
                "item": item.copy(),
            }
        )
        if item["type"] != "function_call":
            part = _output_text("") if item["type"] == "message" else _reasoning_text("")
            found.append(
                {
                    "type": "response.content_part.added",
                    "sequence_number": self.number(),
                    **self._place(item),
                    "part": part,
                }
            )

    def _add(self, text: str, found: list[OpenAiResponseEvent]) -> None:
        assert self.open is not None, "text is of an item"
        self.parts.append(text)
        found.append(self.delta(self.open, text, self.number()))

    def _close(self, found: list[OpenAiResponseEvent], *, status: Status = "completed") -> None:
        item = self.open
        if item is None:
            return
        item["status"] = status
        self._finish(item, "".join(self.parts), found)
        found.append(
            {
                "type": "response.output_item.done",
                "sequence_number": self.number(),
                "output_index": len(self.output) - 1,
                "item": item.copy(),
            }
        )
        self.open = None

    def _finish(self, item: ResponseItem, text: str, found: list[OpenAiResponseEvent]) -> None:
        """Put an item's whole text into it."""
        if item["type"] == "function_call":
            item["arguments"] = text
            if item["status"] == "completed":  # clients take the event for a call to make
                found.append(
                    {
                        "type": "response.function_call_arguments.done",
                        "sequence_number": self.number(),
                        **self._call_place(item),
                        "name": item["name"],
                        "arguments": text,
                    }
                )
            return
        part: OutputText | ReasoningText
        if item["type"] == "message":
            part = _output_text(text)
            item["content"] = [part]
            found.append(
                {
                    "type": "response.output_text.done",
                    "sequence_number": self.number(),
                    **self._place(item),
                    "text": text,
                    "logprobs": [],
                }
            )
        else:
            part = _reasoning_text(text)
            item["content"] = [part]
            found.append(
                {
                    "type": "response.reasoning_text.done",
                    "sequence_number": self.number(),
                    **self._place(item),
                    "text": text,
                }
            )
        found.append(
            {
                "type": "response.content_part.done",
                "sequence_number": self.number(),
                **self._place(item),
                "part": part,
            }
        )

    def _message(self) -> MessageItem:
        id = self._new_id("msg")
        return {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}

    def _reasoning(self) -> ReasoningItem:
        return {"id": self._new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}

    def _call(self, namespace: str, name: str) -> CallItem:
        item: CallItem = {
            "id": self._new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": new_id("call"),
            "name": name,
        }
        if namespace:
            item["namespace"] = namespace
        return item


def _output_text(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_text(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}

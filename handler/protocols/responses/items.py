"""Output items from the events of an assistant's answer, and the stream's events about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from handler.core.identifiers import new_digits
from handler.protocols.assistant.events import Arguments, CallStart, Event, Reasoning

Value = dict[str, Any]

_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{new_digits()}"


class Items:
    """Builds one answer's items, in order. White space alone is no message beside other items.

    Args:
        namespaces: a tool's name in the prompt -> its namespace and its name there.
        single: keep the first call only.

    Attributes:
        output: the items so far; the last one may be open.
        kind: the open item's type; "" where none is open.
        parts: the pieces of its text.
        broken: a call is not whole.
    """

    def __init__(self, namespaces: Mapping[str, tuple[str, str]], *, single: bool = False) -> None:
        self._namespaces = namespaces
        self._single = single
        self._space = ""
        self.output: list[Value] = []
        self.kind = ""
        self.parts: list[str] = []
        self.broken = False

    def feed(self, events: Iterable[Event]) -> list[Value]:
        found: list[Value] = []
        for event in events:
            if isinstance(event, str):
                self._text(event, found)
            elif isinstance(event, Reasoning):
                if self.kind != "reasoning":
                    self._begin("reasoning", {"summary": [], "content": []}, found)
                self._add(event.text, found)
            elif self._single and event.number:
                continue
            elif isinstance(event, CallStart):
                namespace, name = self._namespaces.get(event.name, ("", event.name))
                more = {"namespace": namespace} if namespace else {}
                call = {"arguments": "", "call_id": new_id("call"), "name": name, **more}
                self._begin("function_call", call, found)
            elif isinstance(event, Arguments):
                self._add(event.text, found)
            else:
                self.broken |= not event.whole
                self._close(found, status="completed" if event.whole else "incomplete")
        return found

    def end(self, *, complete: bool) -> list[Value]:
        """Return the events of the last item's end."""
        found: list[Value] = []
        if self._space and not self.output:
            space = self._space
            self._begin("message", {"role": "assistant", "content": []}, found)
            self._add(space, found)
        self._close(found, status="completed" if complete else "incomplete")
        return found

    @property
    def place(self) -> Value:
        """Where a delta of the open item belongs."""
        index = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **index}

    def delta(self, text: Any) -> Value:
        """Return a delta of the open item."""
        more: Value = {"logprobs": []} if self.kind == "message" else {}
        return {"type": _DELTAS[self.kind], **self.place, "delta": text, **more}

    def _text(self, text: str, found: list[Value]) -> None:
        if self.kind != "message":
            self._space += text
            if not self._space.strip():
                return
            text = self._space
            self._begin("message", {"role": "assistant", "content": []}, found)
        self._add(text, found)

    def _begin(self, kind: str, fields: Value, found: list[Value]) -> None:
        self._close(found)
        self.kind, self._space, self.parts = kind, "", []
        item = {"id": new_id(_KINDS[kind]), "type": kind, "status": "in_progress", **fields}
        self.output.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": {**item}}
        found.append(added)
        if kind != "function_call":
            found.append({"type": "response.content_part.added", **self.place, "part": _part(kind, "")})

    def _add(self, text: str, found: list[Value]) -> None:
        self.parts.append(text)
        found.append(self.delta(text))

    def _close(self, found: list[Value], *, status: str = "completed") -> None:
        if not self.kind:
            return
        item, place, text = self.output[-1], self.place, "".join(self.parts)
        item["status"] = status
        if self.kind == "function_call":
            item["arguments"] = text
            if status == "completed":  # clients take the event for a call to make
                done = {"name": item["name"], "arguments": text}
                found.append({"type": "response.function_call_arguments.done", **place, **done})
        else:
            part = _part(self.kind, text)
            item["content"] = [part]
            more: Value = {"logprobs": []} if self.kind == "message" else {}
            found.append({"type": f"response.{part['type']}.done", **place, "text": text, **more})
            found.append({"type": "response.content_part.done", **place, "part": part})
        found.append({"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": {**item}})
        self.kind = ""


def _part(kind: str, text: str) -> Value:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""Content blocks from the events of an assistant's answer: which begins, what it gets, when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from handler.core.framing import rewritten
from handler.core.identifiers import new_digits
from handler.core.text import StopMatcher
from handler.protocols.anthropic.answers import Block, BlockDelta, BlockEvent
from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event, Reasoning
from handler.protocols.assistant.tools.json_text import is_object

SIGNATURE = "lmi"
"""Of every thinking block. Clients only send back thoughts that have one; it is not checked then."""


def tool_use_id() -> str:
    return f"toolu_{new_digits()[:24]}"


class Blocks:
    """Turns events into the start, the pieces and the stop of each block, in order.

    White space alone is no block of text beside other blocks.

    Args:
        stops: the client's stop strings. Each is left out of the text that it ends; the engine sends it.
        show_thoughts: thinking blocks have a text.
        single: keep the first call only.

    Attributes:
        num_calls: those that have begun.
        broken: one of them is not whole.
        index: of the block that is open, or was last.
    """

    def __init__(self, stops: Sequence[str] = (), *, show_thoughts: bool = True, single: bool = False) -> None:
        self._stops = stops
        self._show_thoughts = show_thoughts
        self._single = single
        self._matcher = StopMatcher(stops)
        self._space = ""
        self._open = ""  # the type of the block that is open
        self.index = -1
        self.num_calls = 0
        self.broken = False

    @property
    def called(self) -> bool:
        """Whether there are calls, and the client may make them: all are whole."""
        return self.num_calls > 0 and not self.broken

    def feed(self, events: Iterable[Event]) -> list[BlockEvent]:
        found: list[BlockEvent] = []
        for event in events:
            if isinstance(event, str):
                self._text(self._matcher.feed(event) if self._stops else event, found)
            elif isinstance(event, Reasoning):
                self._thinking(event.text, found)
            elif not (self._single and event.number):
                self._call(event, found)
        return found

    def end(self) -> list[BlockEvent]:
        """Return the rest of the last block, and its stop."""
        found: list[BlockEvent] = []
        self._end_text(found)
        if (space := self._space) and self.index < 0:
            self._begin({"type": "text", "text": ""}, found)
            self._add({"type": "text_delta", "text": space}, found)
        self._close(found)
        return found

    def _text(self, text: str, found: list[BlockEvent]) -> None:
        if self._open != "text":
            self._space += text
            if not self._space.strip():
                return
            text, self._space = self._space, ""
            self._begin({"type": "text", "text": ""}, found)
        elif self._stops and not text:
            return
        self._add({"type": "text_delta", "text": text}, found)

    def _thinking(self, text: str, found: list[BlockEvent]) -> None:
        self._end_text(found)
        if self._open != "thinking":
            self._begin({"type": "thinking", "thinking": "", "signature": ""}, found)
        if self._show_thoughts:
            self._add({"type": "thinking_delta", "thinking": text}, found)

    def _call(self, event: CallStart | Arguments | CallEnd, found: list[BlockEvent]) -> None:
        self._end_text(found)
        if isinstance(event, CallStart):
            self.num_calls += 1
            self._begin({"type": "tool_use", "id": tool_use_id(), "name": event.name, "input": {}}, found)
        elif isinstance(event, Arguments):
            self._add({"type": "input_json_delta", "partial_json": event.text}, found)
        else:
            self.broken |= not event.whole
            self._close(found)

    def _end_text(self, found: list[BlockEvent]) -> None:
        """Show the text that might have begun a stop string; none spans two blocks."""
        if self._stops and not self._matcher.matched:
            self._text(self._matcher.flush(), found)
            self._matcher = StopMatcher(self._stops)

    def _begin(self, block: Block, found: list[BlockEvent]) -> None:
        self._close(found)
        self._space = ""
        self.index += 1
        self._open = block["type"]
        found.append({"type": "content_block_start", "index": self.index, "content_block": block})

    def _add(self, delta: BlockDelta, found: list[BlockEvent]) -> None:
        found.append({"type": "content_block_delta", "index": self.index, "delta": delta})

    def _close(self, found: list[BlockEvent]) -> None:
        if self._open == "thinking":
            self._add({"type": "signature_delta", "signature": SIGNATURE}, found)
        if self._open:
            found.append({"type": "content_block_stop", "index": self.index})
        self._open = ""


def gather(events: Iterable[BlockEvent]) -> list[Block]:
    """Join a stream's events to the blocks of a whole answer. A call whose arguments are no object becomes text."""
    content: list[Any] = []
    pieces: dict[str, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"]})
            pieces = {}
        elif event["type"] == "content_block_delta":
            delta: Any = event["delta"]
            field = "partial_json" if delta["type"] == "input_json_delta" else delta["type"].removesuffix("_delta")
            pieces.setdefault(field, []).append(delta[field])
        else:
            arguments = "".join(pieces.pop("partial_json", ()))
            content[-1] |= {field: "".join(texts) for field, texts in pieces.items()}
            if content[-1]["type"] == "tool_use":
                whole = is_object(arguments)
                said = {"type": "text", "text": f"{content[-1]['name']} {arguments}"}
                content[-1] = {**content[-1], "input": rewritten(arguments)} if whole else said
    return content

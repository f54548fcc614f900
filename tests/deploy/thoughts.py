"""A thought and a text in each dialect that has thoughts, for whatever stands before /invocations.

Made for the echo engine with OPTIONS: the parser reads the prompt's words up to the end mark as a thought.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

OPTIONS = {"option.reasoning_parser": "deepseek_r1"}
THOUGHT, TEXT = " user: Hm ", " Yes"


class Case(NamedTuple):
    """A request, and what of an answer is thought and text.

    Attributes:
        route: "": the body's shape selects the dialect.
        whole: [thought, text] of a whole answer.
        piece: the same of one event of a stream, each "" where it has none.
    """

    body: dict[str, Any]
    route: str
    stream_type: str
    whole: Callable[[Any], list[str]]
    piece: Callable[[Any], list[str]]

    @property
    def attributes(self) -> str:
        """The value of SageMaker's custom attributes."""
        return f"route={self.route}" if self.route else "c=1"

    def streamed(self, body: str) -> list[str]:
        """Join the thought's and the text's pieces of a stream."""
        lines = [line.removeprefix("data: ") for line in body.splitlines()]
        pieces = [self.piece(json.loads(line)) for line in lines if line.startswith("{")]
        return ["".join(parts) for parts in zip(*pieces, strict=True)]


def _message(answer: Any) -> list[str]:
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"]
    return [message["reasoning"], message["content"]]


def _delta(event: Any) -> list[str]:
    delta = event["choices"][0]["delta"]
    return [delta.get("reasoning_content") or "", delta.get("content") or ""]


def _blocks(answer: Any) -> list[str]:
    thought, text = answer["content"]
    return [thought["thinking"], text["text"]]


def _block_delta(event: Any) -> list[str]:
    delta = event.get("delta", {})
    return [delta.get("thinking", ""), delta.get("text", "")]


def _items(answer: Any) -> list[str]:
    return [item["content"][0]["text"] for item in answer["output"]]


def _item_delta(event: Any) -> list[str]:
    kinds = ("response.reasoning_text.delta", "response.output_text.delta")
    return [event["delta"] if event["type"] == kind else "" for kind in kinds]


_ASKED = {"messages": [{"role": "user", "content": "Hm </think> Yes"}], "max_tokens": 4}
_BEDROCK = {**_ASKED, "anthropic_version": "bedrock-2023-05-31"}
_SSE = "text/event-stream"
CASES = {
    "LMI's chat": Case(_ASKED, "", "application/jsonlines", _message, _delta),
    "OpenAI's chat": Case(_ASKED, "/v1/chat/completions", _SSE, _message, _delta),
    "message by route": Case(_ASKED, "/v1/messages", _SSE, _blocks, _block_delta),
    "message by shape": Case(_BEDROCK, "", _SSE, _blocks, _block_delta),
    "response": Case({"input": "Hm </think> Yes", "max_output_tokens": 4}, "/v1/responses", _SSE, _items, _item_delta),
}

"""The golden cases of Anthropic's messages."""

from __future__ import annotations

from typing import Any

from handler.core.errors import PromptTooLong
from handler.core.values import Delta, Finish
from tests.unit.protocols.answers import CITY, deltas, failing, refused, saying, shorter

ASK: dict[str, Any] = {"model": "model", "max_tokens": 16, "messages": [{"role": "user", "content": "What is"}]}
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": CITY}]
CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call>'
TWO = (
    '<tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "weather", "arguments": {}}]</tool_call>'
)

THINKING = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": TOOLS, "stop_sequences": ["Hm"]}
THOUGHT = (
    '<think>Hm, so.</think>\n\nWait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)
TEMPLATE = "{% if enable_thinking %}<think></think>{{ tools }}<tool_call>"


def body(**more: Any) -> dict[str, Any]:
    return {**ASK, **more}


def stopped(text: str) -> list[Delta]:
    """An answer that a stop string ended, which its text includes."""
    return saying(text, 3, Finish.STOP)


CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    f"anthropic/{name}": (schema, asked, script)
    for name, (schema, asked, script) in {
        "plain": ("anthropic_messages", ASK, None),
        "stream": ("anthropic_messages", body(stream=True), None),
        "max_tokens": ("anthropic_messages", body(max_tokens=4), saying("One, two", 2, Finish.LENGTH)),
        "no_tokens": ("anthropic_messages", body(max_tokens=0), saying("One", 4, Finish.LENGTH)),
        "stream_no_tokens": ("anthropic_messages", body(max_tokens=0, stream=True), saying("One", 4)),
        "context_window": ("anthropic_messages", ASK, saying("One, two", 2, Finish.LENGTH)),
        "stop": ("anthropic_messages", body(stop_sequences=["x", "d."]), stopped("The end.")),
        "stream_stop": ("anthropic_messages", body(stop_sequences=["x", "d."], stream=True), stopped("The end.")),
        "tools": ("anthropic_messages", body(tools=TOOLS), saying(CALL)),
        "stream_tools": ("anthropic_messages", body(tools=TOOLS, stream=True), saying(CALL, 9)),
        "any_tool": (
            "anthropic_messages",
            body(tools=TOOLS, tool_choice={"type": "any"}),
            saying('[{"name": "weather", "arguments": {"city": "Köln"}}]'),
        ),
        "one_tool": (
            "anthropic_messages",
            body(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
            saying(TWO),
        ),
        "named_tool": (
            "anthropic_messages",
            body(tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, stream=True),
            saying('{"city": "Köln"}'),
        ),
        "thinking": ("anthropic_messages_thinking", THINKING, saying(THOUGHT)),
        "stream_thinking": ("anthropic_messages_thinking", {**THINKING, "stream": True}, saying(THOUGHT, 9)),
        "omitted_thinking": (
            "anthropic_messages_thinking",
            {**THINKING, "thinking": {"type": "adaptive", "display": "omitted"}, "stream": True},
            saying(THOUGHT, 9),
        ),
        "blank": ("anthropic_messages", body(stream=True), saying("\n \n", 1)),
        "fails": ("anthropic_messages", ASK, failing(2)),
        "stream_fails": ("anthropic_messages", body(stream=True), failing(2)),
        "stream_fails_at_once": ("anthropic_messages", body(stream=True), failing(0)),
        "prompt_too_long": ("anthropic_messages", ASK, refused(PromptTooLong("messages", 9000, 8191))),
        "bad_payload": ("anthropic_messages", {"max_tokens": 16}, None),
        "bad_parameter": ("anthropic_messages", body(temperature=3, stream=True), None),
        "bedrock": ("lmi", {**ASK, "anthropic_version": "bedrock-2023-05-31"}, shorter(0)),
        "count": ("anthropic_count", {"messages": ASK["messages"]}, deltas()[:1]),
    }.items()
}

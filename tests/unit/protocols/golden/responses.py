"""The golden cases of OpenAI's responses."""

from __future__ import annotations

from typing import Any

from handler.core.values import Delta, Finish
from tests.unit.protocols.answers import CITY, deltas, failing, saying

ASK: dict[str, Any] = {"model": "model", "input": "What is"}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY, "strict": True}
TOOLS = [
    WEATHER,
    {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{**WEATHER, "name": "close"}]},
]
CALL = 'Wait. <tool_call>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_call>'
CLOSE = '<tool_call>[{"name": "agents.close", "arguments": {}}, {"name": "weather", "arguments": {}}]</tool_call>'
THOUGHT = "<think>Hm, so.</think>\n\nYes."


def body(**more: Any) -> dict[str, Any]:
    return {**ASK, **more}


CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    f"responses/{name}": (f"openai_responses{suffix}", asked, script)
    for name, suffix, asked, script in (
        ("plain", "", ASK, None),
        ("stream", "", body(stream=True), None),
        ("incomplete", "", body(max_output_tokens=4), saying("One, two", 2, Finish.LENGTH)),
        ("stream_incomplete", "", body(max_output_tokens=4, stream=True), saying("One, two", 2, Finish.LENGTH)),
        ("tools", "", body(tools=TOOLS), saying(CALL)),
        ("stream_tools", "", body(tools=TOOLS, stream=True), saying(CALL, 9)),
        ("namespace", "", body(tools=TOOLS), saying(CLOSE)),
        ("one_tool", "", body(tools=TOOLS, parallel_tool_calls=False), saying(CLOSE)),
        ("thinking", "_thinking", ASK, saying(THOUGHT)),
        ("stream_thinking", "_thinking", body(stream=True), saying(THOUGHT, 9)),
        ("blank", "", body(stream=True), saying("\n \n", 1)),
        ("fails", "", ASK, failing(2)),
        ("stream_fails", "", body(stream=True), failing(2)),
        ("store", "", body(store=True), None),
        ("count", "_count", ASK, deltas()[:1]),
        ("compact_fails", "_compact", ASK, failing(2)),
    )
}

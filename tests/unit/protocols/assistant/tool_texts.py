"""Tools, and answers that call them in each format: the golden files that parsers and vLLM's parsers are read by."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from handler.protocols.assistant.events import Arguments, CallEnd, CallStart, Event, EventParser
from handler.protocols.assistant.tools.grammar import Notation

GOLDEN = Path(__file__).parents[3] / "golden" / "tool_calls"


def _tool(name: str, properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **others}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool(
        "weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "metric": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    ),
    _tool("time", {}),
    _tool("write", {"path": {"type": "string"}, "text": {"type": "string"}}),
]

BEGUN = {
    "openai": ("<|channel|>commentary to=functions.time<|message|>{", '"a": 1, ', "<|cal"),
    "gemma4": ("<|tool_call>call:time{", "a:1,", "<tool_call"),
    "pythonic": ("[time(", "a=1, ", ")"),
    "llama4_pythonic": ("<|python_start|>[time(", "a=1, ", ")"),
    "glm45": ("<tool_call>time\n", "<arg_key>a</arg_key><arg_value>1</arg_value>", "</tool"),
    "glm47": ("<tool_call>time", "<arg_key>a</arg_key><arg_value>1</arg_value>", "</tool"),
    "qwen3_coder": ("<tool_call><function=time>", "<parameter=a>1</parameter>", "</func"),
    "qwen3_xml": ("<tool_call><function=time>", "<parameter=a>1</parameter>", "</func"),
    "mimo": ("<tool_call><function=time>", "<parameter=a>1</parameter>", "</func"),
    "seed_oss": ("<seed:tool_call><function=time>", "<parameter=a>1</parameter>", "</func"),
    "minimax_m2": ('<minimax:tool_call><invoke name="time">', '<parameter name="a">1</parameter>', "</inv"),
    "muse_glimmer": (
        ' to=time<|message|><atem:function_calls><atem:invoke name="time">',
        '<atem:parameter name="a">1</atem:parameter>',
        "</atem:inv",
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="time">',
        '<｜DSML｜parameter name="a">1</｜DSML｜parameter>',
        "</｜DSML｜inv",
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="time">',
        '<｜DSML｜parameter name="a">1</｜DSML｜parameter>',
        "</｜DSML｜inv",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{",
        '"a": 1, ',
        "```",
    ),
    "deepseek_v31": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{", '"a": 1, ', "<｜tool"),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{",
        '"a": 1, ',
        "<|tool",
    ),
    "mistral": ("[TOOL_CALLS]time[ARGS]{", '"a": 1, ', "[TOOL"),
    "granite": ('<|tool_call|>[{"name": "time", "arguments": {', '"a": 1, ', "<|tool"),
    "llama3_json": ('{"name": "time", "parameters": {', '"a": 1, ', "<|py"),
    "phi4_mini_json": ('functools[{"name": "time", "arguments": {', '"a": 1, ', "func"),
    "jamba": ('<tool_calls>[{"name": "time", "arguments": {', '"a": 1, ', "</too"),
    "nemotron_json": ('<TOOLCALL>[{"name": "time", "arguments": {', '"a": 1, ', "</TOO"),
    "longcat": ('<longcat_tool_call>{"name": "time", "arguments": {', '"a": 1, ', "</long"),
    "granite-20b-fc": ('<function_call> {"name": "time", "arguments": {', '"a": 1, ', "<func"),
    "gigachat3": ('<|function_call|>{"name": "time", "arguments": {', '"a": 1, ', "<|mess"),
    "inkling": ('<|content_invoke_tool_json|>{"name": "time", "args": {', '"a": 1, ', "<|end_m"),
    "internlm": ('<|action_start|><|plugin|>{"name": "time", "parameters": {', '"a": 1, ', "<|act"),
    "apertus": ('<|tools_prefix|>[{"time": {', '"a": 1, ', "<|too"),
    **dict.fromkeys(
        ("cohere_command3", "cohere_command4"),
        ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "time", "parameters": {', '"a": 1, ', "<|END"),
    ),
    "xlam": ('[{"name": "time", "arguments": {', '"a": 1, ', "</too"),
    "lfm2": ("<|tool_call_start|>[time(", "a=1, ", ")"),
    "olmo3": ("<function_calls>time(", "a=1, ", ")"),
    "functiongemma": ("<start_function_call>call:time{", "a:1,", "<end_func"),
    "hy_v3": (
        "<tool_calls:opensource>\n<tool_call:opensource>time<tool_sep:opensource>\n",
        "<arg_key:opensource>a</arg_key:opensource><arg_value:opensource>1</arg_value:opensource>",
        "</tool",
    ),
    "hy_v4": ("<tool_calls>\n<tool_call>time", "<arg_key>a</arg_key><arg_value>1</arg_value>", "</tool"),
    "k2_horizon": (
        "<ifm|tool_calls><ifm|tool_call>time",
        "<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>1</ifm|arg_value>",
        "</ifm|tool",
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="time" index="1"<|sep|>',
        '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>',
        "<|close|>cal",
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="time">',
        "]<]minimax[>[<a>1]<]minimax[>[</a>",
        "]<]minimax[>[</inv",
    ),
    "deepseek_v41": (
        '<｜DSML｜ calls><｜DSML｜ invoke name="time">',
        '<｜DSML｜ parameter name="a">1</｜DSML｜ parameter>',
        "</｜DSML｜ inv",
    ),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="time">',
        '<steptml:parameter name="a">1</steptml:parameter>',
        "</steptml:inv",
    ),
    "minicpm5": ('<function name="time">', '<param name="a">1</param>', "</func"),
    "dots": ('<dots_function_call><invoke name="time">', '<parameter name="a">1</parameter>', "</inv"),
    **dict.fromkeys(
        ("hermes", "granite4", "smollm2"), ('<tool_call>{"name": "time", "arguments": {', '"a": 1, ', "</too")
    ),
}
"""A call of `time` up to its arguments, an argument, and the beginning of an end; by format."""

Read = list[str | list[str]]
"""Text, and calls as a name and the text of the arguments."""


def read(parser: EventParser, pieces: Iterable[str]) -> Read:
    """Join the events of an answer that comes in pieces."""
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    found: Read = []
    calls: list[list[str]] = []
    ended = 0
    for event in [*events, *parser.flush()]:
        if isinstance(event, str):
            assert event, "no event is empty"
            if found and isinstance(found[-1], str):
                found[-1] += event
            else:
                found.append(event)
        elif isinstance(event, CallStart):
            assert event.number == len(calls), "calls are counted from 0"
            calls.append([event.name, ""])
            found.append(calls[-1])
        elif isinstance(event, CallEnd):
            assert (event.number, ended) == (len(calls) - 1,) * 2, "a call ends once"
            ended += 1
        else:
            assert isinstance(event, Arguments)
            assert found[-1] is calls[event.number], "nothing comes between a call and its arguments"
            assert event.number == ended, "an ended call has no more arguments"
            calls[-1][1] += event.text
    assert ended == len(calls), "each call ends"
    return found


def golden(format: str) -> dict[str, dict[str, Any]]:
    """The answers in one format, by case: `text`, and `events` as `read` joins them."""
    return dict(json.loads((GOLDEN / f"{format}.json").read_text()))


_PARAMETERS = {
    "qwen_xml": "<parameter={}>{}</parameter>",
    "minimax_xml": '<parameter name="{}">{}</parameter>',
    "deepseek_xml": '<｜DSML｜parameter name="{}" string="{string}">{}</｜DSML｜parameter>',
    "glm_xml": "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
}


def write(notation: Notation, *calls: tuple[str, dict[str, Any]]) -> str:
    """Write calls as a notation's rule has them."""
    written: list[str] = []
    for name, arguments in calls:
        text = json.dumps(arguments, ensure_ascii=False)
        if pattern := _PARAMETERS.get(notation.style):
            plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            string = {key: str(isinstance(value, str)).lower() for key, value in arguments.items()}
            text = "".join(pattern.format(key, value, string=string[key]) for key, value in plain.items())
        before, after = notation.call
        written.append(before.replace("NAME", name).replace("NUMBER", str(len(written))) + text + after)
    return notation.block[0] + notation.between.join(written) + notation.block[1]

"""Response templates of the forms that public models have, with answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _template(start: Any, **fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}


TEMPLATES: Mapping[str, dict[str, Any]] = {
    # a block a part, and the calls as a list
    "blocks": _template(
        "<|BOT|>",
        thinking={"open": "<|THINK|>", "close": "<|/THINK|>"},
        content={"open": "<|SAY|>", "close": "<|/SAY|>"},
        tool_calls={
            "open": "<|DO|>",
            "close": "<|/DO|>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    ),
    # an object a call, text around
    "hermes": _template(
        "<|im_start|>assistant\n",
        thinking={"open": "<think>", "close": "</think>"},
        tool_calls={
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        content={"close": "<|im_end|>"},
    ),
    # a header with the name, the arguments as they come
    "channels": _template(
        "<|start|>assistant",
        thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        content={"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        tool_calls={
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": CALL,
        },
    ),
    # tags
    "tags": _template(
        "<|im_start|>assistant\n",
        thinking={"open": "<think>", "close": "</think>"},
        tool_calls={
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": CALL,
        },
    ),
    # strings between marks, keys without quotes
    "own strings": _template(
        ["<|turn>model\n", "<tool_response|>"],
        thinking={"open": "<|channel>thought\n", "close": "<channel|>"},
        content={"close": ["<turn|>", "<|tool_response>"]},
        tool_calls={
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": CALL,
        },
    ),
    # a thought from the start on, line ends in marks, arguments in lines
    "lines": {
        "start_anchor_pattern": r"<bot(?: \w+)?>",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>",
                "close_pattern": r"</call>|$",
                "content": "kv-lines",
                "content_args": {"kv_sep": "="},
                "transform": CALL,
            },
        },
    },
    # several messages of a kind, with an author before each
    "messages": _template(
        "<|message|>",
        thinking={
            "open_pattern": r"(?:<\|message\|>)?[^<]*<\|thinking\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "; ",
            "content_args": {"strip": False},
        },
        content={
            "open_pattern": r"(?:<\|message\|>)?[^<]*<\|text\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "",
            "content_args": {"strip": False},
        },
        tool_calls={
            "open_pattern": r"(?:<\|message\|>)?[^<]*<\|tool\|>",
            "close": "<|end|>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
    ),
}


class Answer(NamedTuple):
    """An answer, the prompt before it, and its parts."""

    template: str
    prompt: str
    text: str
    thoughts: str
    content: str
    calls: list[tuple[str, Any]]


def answers() -> list[Answer]:
    return [
        Answer("blocks", "<|BOT|>", "<|THINK|> Hm. <|/THINK|><|SAY|>Yes.<|/SAY|><|END|>", "Hm.", "Yes.", []),
        Answer(
            "blocks",
            "<|BOT|><|THINK|>",
            'Hm.<|/THINK|><|DO|>[{"tool_name": "f", "parameters": {"a": 1}}, '
            '{"tool_name": "g", "parameters": {}}]<|/DO|>',
            "Hm.",
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        Answer(
            "hermes",
            "<|im_start|>assistant\n",
            '<think>\nHm.\n</think>\n\nWell:\n<tool_call>\n{"name": "f", "arguments": {"a": "é\\n</tool_call>"}}\n'
            '</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>\nDone.<|im_end|>',
            "Hm.",
            "Well:\n\n\nDone.",
            [("f", {"a": "é\n</tool_call>"}), ("g", {})],
        ),
        Answer("hermes", "<|im_start|>assistant\n<think>\n", "Hm.</think>Yes.<|im", "Hm.", "Yes.<|im", []),
        Answer("hermes", "no anchor", "Yes. <tool_call>no</tool_call>", "", "Yes. <tool_call>no</tool_call>", []),
        Answer(
            "channels",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get-it "
            '<|constrain|>json<|message|>{"a": [1, {"b": 2}]}<|call|>',
            "Hm.",
            "",
            [("get-it", {"a": [1, {"b": 2}]})],
        ),
        Answer("channels", "<|start|>assistant", "<|channel|>final<|message|>2 < 3<|return|>", "", "2 < 3", []),
        Answer(
            "tags",
            "<|im_start|>assistant\n",
            "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>"
            "\n<parameter=at>[1, 2]</parameter>\n</function>\n</tool_call>",
            "",
            "Hm.",
            [("weather", {"city": "Paris", "days": 3, "at": [1, 2]})],
        ),
        Answer(
            "own strings",
            "<|turn>model\nold<turn|><|turn>model\n",
            "<|channel>thought\nHm.\n<channel|>"
            '<|tool_call>call:f{a:7,b:<|"|>x,y:1 "z"<|"|>,c:{d:[<|"|>{e:1}<|"|>]}}<tool_call|>',
            "Hm.",
            "",
            [("f", {"a": 7, "b": 'x,y:1 "z"', "c": {"d": ["{e:1}"]}})],
        ),
        Answer("lines", "<bot>", "Hm.</think>\n<response>\nYes.\n</response>\n</s>", "Hm.", "Yes.", []),
        Answer("lines", "<bot two>", "Hm.</think><call:f>\na=1\nb = two\n", "Hm.", "", [("f", {"a": "1", "b": "two"})]),
        Answer(
            "messages",
            "<|message|>user<|text|>Hi<|end|><|message|>",
            "<|thinking|>Hm.<|end|><|message|>bot<|thinking|> So.<|end|>"
            '<|message|><|tool|>{"name": "f", "args": {"a": 1}}'
            "<|end|><|message|>bot<|text|> Yes. <|end|><|message|><|text|>No.<|end|>",
            "Hm.;  So.",
            " Yes. No.",
            [("f", {"a": 1})],
        ),
    ]

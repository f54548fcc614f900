"""The forms in which models write calls of tools, by name; how a prompt shows tools where a template has no place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.text import Vocabulary


class Format(NamedTuple):
    """Calls are JSON objects with `name` and `arguments` (or `parameters`), with `begin` and `end` about them.

    Without a `begin` an answer that starts as such an object is a call.
    """

    name: str
    begin: str = ""
    end: str = ""

    def special(self, vocabulary: Vocabulary | None) -> frozenset[str]:
        """Those of its marks that are special tokens, which are no text unless somebody asks for them."""
        if vocabulary is None:
            return frozenset()
        return frozenset({self.begin, self.end} & {vocabulary.text(id) for id in vocabulary.special} - {""})


HERMES = Format("hermes", "<tool_call>", "</tool_call>")
"""An object between the marks, several of both for several calls (Hermes 2 Pro, Qwen 2.5 and 3, SmolLM3)."""

SMOLLM2 = Format("smollm2", "<tool_call>", "</tool_call>")
"""A list of objects between the marks (SmolLM2's documentation)."""

LLAMA3 = Format("llama3_json", "<|python_tag|>")
"""The answer is an object with `parameters`, after a mark or without one (Llama 3.1's documentation)."""

FORMATS = {format.name: format for format in (HERMES, SMOLLM2, LLAMA3)}


def takes_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


def choose(name: str, template: str) -> Format | None:
    """The format of that name; auto: as the chat template shows it, None where it shows one that is not known here."""
    if name != "auto":
        return FORMATS[name]
    if not takes_tools(template):
        return SMOLLM2  # which our own words about the tools ask for
    return next((format for format in (LLAMA3, HERMES) if format.begin in template), None)


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that has no place for tools, which are text then, with calls and answers: SmolLM2's."""
    plain = [_plain(message) for message in messages]
    if tools:
        instructions = _instructions(tools)
        if plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{instructions}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls", ())
    ]
    written = f"{SMOLLM2.begin}{_json(calls)}{SMOLLM2.end}" if calls else ""
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], written)))}


def _instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    example = _json([{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}])
    return (
        f"These functions can be called:\n<tools>{_json([tool['function'] for tool in tools])}</tools>\n"
        f"To call some, answer with nothing but a JSON list of the calls between these marks:\n"
        f"{SMOLLM2.begin}{example}{SMOLLM2.end}\n"
        "If none is of use, or an argument that is needed is missing, answer in words."
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""The formats in which models write tool calls, by name, and the prompt for models whose template has no place for
tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.text import Vocabulary


class Format(NamedTuple):
    """Calls are JSON objects with `name` and `arguments` (or `parameters`), between `begin` and `end`.

    Without a `begin` an answer that starts as such an object is a call.
    """

    name: str
    begin: str = ""
    end: str = ""

    def special(self, vocabulary: Vocabulary | None) -> frozenset[str]:
        """Return the marks that are special tokens, which a tokenizer leaves out of the text by default."""
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
    """Return whether a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


def choose(name: str, template: str) -> Format | None:
    """Return the format of that name. "auto" takes it from the chat template; None where the template shows no known
    one.
    """
    if name != "auto":
        return FORMATS[name]
    if not takes_tools(template):
        return SMOLLM2  # which our own words about the tools ask for
    return next((format for format in (LLAMA3, HERMES) if format.begin in template), None)


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite messages for a template without a place for tools: all about tools becomes text, as in SmolLM2."""
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

"""Tools and calls in a prompt: by the chat template, or as text where it has no place for them."""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from handler.protocols.assistant.template import THOUGHTS
from handler.protocols.assistant.tools.formats import find
from handler.protocols.assistant.tools.formats.json_calls import SMOLLM2
from handler.protocols.assistant.tools.grammar import Notation, write_calls
from handler.protocols.assistant.tools.json_text import dumps
from handler.protocols.assistant.tools.parsing import Format

Message = Mapping[str, Any]

_OUR_OWN = SMOLLM2.notations[""]
"""What we ask for where no format is named."""

_TOOLS = re.compile(r"\btools\b")

_SHORT_ID = re.compile(r"id\|length != 9")
"""Mistral's templates refuse a call's id of another length."""

_INDEXED_ID = re.compile(r"<\|tool_calls_section_begin\|>")
"""Kimi K2's templates print a call's id, which holds the tool's name, before its arguments and before its result."""

_FIRST_CALL = re.compile(r"\A(?s:(?!.* in (?:message|m)(?:\.|\[['\"])tool_calls).*)tool_calls\[0\]")
"""The templates of GigaChat 3, gpt-oss and Llama 3 print the first call of a message, or refuse several."""

_ONE_TEXT = re.compile(r"\.content and \w+\.thinking\b[^{}]*%\}\s*\{\{-?\s*raise_exception")
"""gpt-oss's template refuses a message with calls that has both reasoning and text: it prints either as analysis."""

_CALLS = re.compile(r"\btool_calls\b")
"""Templates of LFM2 and of Granite 3.3 have no word of calls: they print a message's role and text alone."""

_DESCRIPTION = re.compile(r"[+~]\s*(?:(?:\w+\.)+description|\(\w+\.description \| tojson)")
"""The templates of gpt-oss and Muse Glimmer, and some others, fail for a tool without a description."""


def lay_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], template: str, format: Format | None = None
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Return messages and tools as the model's chat template takes them.

    Args:
        format: that in which the answers' calls are read, which is also that of calls in text; None: the template's.
    """
    messages = _results_in_order(messages)
    if not takes_tools(template):
        return tuple(_plain_messages(messages, tools, _notation(template, format) or _OUR_OWN)), ()
    if _shows(_SHORT_ID, template):
        messages = [_with_short_ids(message) for message in messages]
    elif _shows(_INDEXED_ID, template):
        messages = _with_indexed_ids(messages)
    elif _shows(_FIRST_CALL, template):
        messages = _one_call_a_message(messages)
        if _shows(_ONE_TEXT, template):
            messages = [_with_one_text(message) for message in messages]
    elif not _shows(_CALLS, template) and (notation := _notation(template, format, find(template))) is not None:
        messages = [_with_written_calls(message, notation) for message in messages]
    if _shows(_DESCRIPTION, template):
        tools = [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
    return tuple(messages), tuple(tools)


def _with_short_ids(message: Message) -> Message:
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    if "tool_calls" in message:
        message = {
            **message,
            "tool_calls": [{**call, "id": _short(call.get("id", ""))} for call in message["tool_calls"]],
        }
    return message


def _with_indexed_ids(messages: Sequence[Message]) -> list[Message]:
    """Give calls and their results the ids that Kimi K2 knows: `functions.NAME:INDEX`, counted over all messages."""
    ids: dict[str, str] = {}
    count = 0
    found = []
    for message in messages:
        if message.get("tool_calls"):
            calls: list[Any] = []
            for call in message["tool_calls"]:
                id = f"functions.{call['function']['name']}:{count}"
                ids[call.get("id", "")] = id
                calls.append({**call, "id": id})
                count += 1
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id", "") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        found.append(message)
    return found


def _one_call_a_message(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, with its results after it."""
    found: list[Message] = []
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while waiting and waiting[0]["role"] == "tool":
            result = waiting.popleft()
            results.setdefault(result.get("tool_call_id", ""), []).append(result)
        for number, call in enumerate(calls):
            whole = {"role": message["role"], "content": ""} if number else message
            found += [{**whole, "tool_calls": [call]}, *results.pop(call.get("id", ""), ())]
        found += [result for others in results.values() for result in others]
    return found


def _with_one_text(message: Message) -> Message:
    """Put the text before calls into the reasoning, at its end."""
    if not (message.get("tool_calls") and message.get("content") and message.get("thinking")):
        return message
    joined = f"{message['thinking']}\n{message['content']}"
    return {**message, "content": "", **{name: joined for name in THOUGHTS if name in message}}


def _with_written_calls(message: Message, notation: Notation, between: str = "") -> Message:
    """Put calls into a message's text, for a template that prints none."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": between.join(filter(None, (message["content"], write_calls(notation, calls))))}


def _short(id: str) -> str:
    """Return nine letters and digits; those of our own ids differ, for their ends do."""
    return "".join(sign for sign in id if sign.isascii() and sign.isalnum())[-9:].rjust(9, "0")


def takes_tools(template: str) -> bool:
    """Return whether a chat template has a place for tools."""
    return _shows(_TOOLS, template)


@functools.lru_cache
def _shows(part: re.Pattern[str], template: str) -> bool:
    return part.search(template) is not None


def _notation(template: str, *formats: Format | None) -> Notation | None:
    """Return how the first of the formats that is known writes calls."""
    found = (format.notation(template) for format in formats if format is not None)
    return next((notation for notation in found if notation is not None), None)


def _plain_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], notation: Notation
) -> list[Message]:
    """Rewrite messages for a template without a place for tools: all about tools becomes text."""
    plain = [_plain(message, notation) for message in messages]
    if tools:
        instructions = _instructions(tools, notation)
        if plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{instructions}"}
        else:
            plain.insert(0, {"role": "system", "content": instructions})
    return plain


def _plain(message: Message, notation: Notation) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return _with_written_calls(message, notation, "\n")


def _instructions(tools: Sequence[Mapping[str, Any]], notation: Notation) -> str:
    form = "a JSON list of the calls between these marks" if notation == _OUR_OWN else "the calls, each in this form"
    example = write_calls(notation, [("NAME", {"ARGUMENT": "VALUE"})])
    return (
        f"These functions can be called:\n<tools>{dumps([tool['function'] for tool in tools])}</tools>\n"
        f"To call some, answer with nothing but {form}:\n{example}\n"
        "If none is of use, or an argument that is needed is missing, answer in words."
    )


def _results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Put the results of a message's calls into the calls' order: agents send them as tools end, and most templates
    print no ids, by which a model could tell whose each is.
    """
    found: list[Message] = []
    for are_results, run in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        together = list(run)
        if are_results and found:
            places = {call.get("id"): place for place, call in enumerate(found[-1].get("tool_calls") or ())}
            together.sort(key=lambda result: places.get(result.get("tool_call_id"), len(places)))
        found += together
    return found

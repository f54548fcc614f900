"""Objects inside bodies: what is unknown, null or of another type in any of them, in each dialect."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handler.core.errors import ServingError
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers import show
from handler.protocols.tgi.native import CHAT_TOKENIZE
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CITY, DIALECTS, USER

SEEING = replace(CAPABLE, no_media={"image": "", "audio": ""})
PNG = "data:image/png;base64,aQ=="
TEXT = {"type": "text", "text": "a"}

CALLED = {"id": "c", "type": "function", "index": 0, "function": {"name": "look", "arguments": "{}"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c", "name": "look", "content": [TEXT]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "user", "content": "go"},
]
MEDIA = [
    {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
    {"type": "input_audio", "input_audio": {"data": "aQ==", "format": "wav"}},
]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": CITY, "strict": False},
}
BY_NAME = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"name": "n", "description": "d", "strict": True, "schema": CITY}

COMMON: list[dict[str, Any]] = [
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "value": {"name": "n", "schema": CITY}}},
    {"response_format": {"type": "regex", "value": "a"}},
    {"structured_outputs": {"regex": "a", "json": None}},
]
PARTED: list[dict[str, Any]] = [
    {"tools": [LOOK], "tool_choice": BY_NAME},
    {"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [BY_NAME]}}},
]
SHOWN: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": MEDIA}]}]
CHATS: list[dict[str, Any]] = [
    {"messages": TALK},
    *({"messages": [USER], **more} for more in (*PARTED, *COMMON)),
    *SHOWN,
]
COMPLETIONS = [{"prompt": "a", **more} for more in COMMON]

ITEMS: list[dict[str, Any]] = [
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG, "detail": "auto"}],
    },
    {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": "x"},
    {"type": "reasoning", "id": "s", "summary": [{"type": "summary_text", "text": "t"}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "m",
        "status": "completed",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "f", "call_id": "c", "name": "look", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
    {"role": "user", "content": "a"},
]
FLAT = {"type": "function", "name": "look", "description": "d", "parameters": CITY, "strict": False}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}}
OWN = {"type": "namespace", "name": "own", "description": "d", "tools": [FLAT]}
FLAT_NAME = {"type": "function", "name": "look"}
RESPONSES: list[dict[str, Any]] = [
    {"input": ITEMS},
    *({"input": [USER], **more} for more in (
        {"tools": [FLAT, PATCH, OWN], "tool_choice": {"type": "custom", "name": "patch"}},
        {"tools": [FLAT, OWN], "tool_choice": {"type": "function", "name": "look", "namespace": "own"}},
        {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [FLAT_NAME]}},
        {"text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "low"}},
        {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low", "summary": "auto"}},
    )),
]  # fmt: skip

SEEN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aQ=="}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [TEXT, SEEN, {"type": "image", "source": {"type": "url", "url": PNG}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {**TEXT, "citations": None},
            {"type": "tool_use", "id": "t", "name": "look", "input": {"city": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [TEXT, SEEN]}],
    },
]
MINE = {"type": "custom", "name": "look", "description": "d", "input_schema": CITY, "strict": False}
EDIT = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
ANTHROPIC: list[dict[str, Any]] = [
    {"max_tokens": 4, "system": [TEXT], "messages": TURNS},
    *({"max_tokens": 4, "messages": [USER], **more} for more in (
        {"tools": [MINE], "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": CITY}}},
        {"context_management": {"edits": [EDIT]}},
        {"output_format": {"type": "json_schema", "schema": CITY}},
    )),
]  # fmt: skip
PROMPTS = [
    {"inputs": "a", "parameters": {"max_new_tokens": 3, "grammar": grammar}}
    for grammar in ({"type": "json", "value": CITY}, {"type": "json_schema", "value": {"name": "n", "schema": CITY}})
]
ROUTES: dict[str, list[dict[str, Any]]] = {
    "openai_chat": CHATS, "tgi_chat_tokenize": CHATS[:3],
    "openai_completions": COMPLETIONS, "lmi": [*CHATS, *COMPLETIONS], "lmi_async": [*CHATS, *COMPLETIONS],
    **dict.fromkeys(("openai_responses", "openai_responses_count"), RESPONSES),
    **dict.fromkeys(("anthropic_messages", "anthropic_count"), ANTHROPIC),
    **dict.fromkeys(("tgi_compat", "dynamic_batch", "tgi", "tgi_generate"), PROMPTS),
    "mindie": [{"inputs": "a", "parameters": {"max_new_tokens": 3}}],
}  # fmt: skip

ANY_KEYS = ("schema", "input_schema", "properties")
"""Fields whose objects may have any keys: JSON schemas."""
Path = tuple[Any, ...]


class Outcome(NamedTuple):
    """What became of a body: the refusal, or the names without effect and the requests."""

    refusal: str = ""
    ignored: frozenset[str] = frozenset()
    requests: str = ""


def outcome(route: str, body: Any, context: ServerContext = SEEING) -> Outcome:
    dialect = CHAT_TOKENIZE if route == "tgi_chat_tokenize" else DIALECTS[route]
    try:
        parsed = dialect.parse(copy.deepcopy(body), context)
    except ServingError as error:
        return Outcome(error.message)
    requests = [one._replace(sampling=one.sampling._replace(seed=0)) for one in parsed.requests]
    return Outcome("", frozenset(parsed.ignored), repr(requests))


def members(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each value inside a body, with its path."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key), item
        yield from members(item, (*path, key))


def names_of(path: Path) -> list[str]:
    return [key for key in path if isinstance(key, str)]


def is_free(path: Path) -> bool:
    """Whether the client chooses the keys of the object at a path."""
    names = names_of(path)
    arguments = names[-1:] == ["input"] and "messages" in names
    schema = names[-2:] == ["function", "parameters"] or names[-2:] in (["tools", "parameters"], ["grammar", "value"])
    return arguments or schema or not {*ANY_KEYS}.isdisjoint(names)


def changed(body: Any, path: Path, value: Any = ..., **more: Any) -> Any:
    """A copy of a body with another value at a path, without it, or with more fields in it."""
    whole = copy.deepcopy(body)
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    if more:
        (holder[path[-1]] if path else whole).update(more)
    elif value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return whole


CASES = [(route, body) for route, bodies in ROUTES.items() for body in bodies]


@in_one_test(("route", "body"), CASES)
def test_an_unknown_name_is_named_unless_it_is_null(route: str, body: Any) -> None:
    plain = outcome(route, body)
    assert not plain.refusal
    for path, value in [((), body), *members(body)]:
        if not isinstance(value, dict) or is_free(path):
            continue
        assert outcome(route, changed(body, path, unheard=None)) == plain, path
        found = outcome(route, changed(body, path, unheard=1))
        assert "'unheard'" in found.refusal or [name for name in found.ignored if "unheard" in name], path


NOT_NULL = {"inputs", "parameters"}  # in TGI


@in_one_test(("route", "body"), CASES)
def test_null_is_absent(route: str, body: Any) -> None:
    for path, _ in members(body):
        if isinstance(path[-1], str) and not is_free(path[:-1]) and path[-1] not in NOT_NULL:
            null, absent = outcome(route, changed(body, path, None)), outcome(route, changed(body, path))
            assert null == absent or (null.refusal and absent.refusal), path


@in_one_test(("route", "body"), CASES)
def test_what_has_another_type_is_named_by_its_path(route: str, body: Any) -> None:
    """A refusal names the field or an object around it, and no field of another dialect."""
    for path, _ in members(body):
        if is_free(path[:-1]):
            continue
        for value in (7, -1, 1.5, True, "x", "", [], [7], {}, {"a": 1}):
            found = outcome(route, changed(body, path, value))
            told = names_of(path)[-1] in found.refusal or found.refusal.startswith("grammar is not valid: ")  # TGI's
            assert told or not found.refusal, (path, value, found.refusal)


@in_one_test("route", ["openai_chat", "lmi", "lmi_async", "tgi_chat_tokenize"])
def test_huggingface_hubs_types_of_calls_are_read(route: str) -> None:
    """Its choice of a tool has no type, and its call names its arguments `parameters`, which TGI reads too."""
    call, named = {"name": "look", "arguments": {"city": "x"}}, {"function": {"name": "look"}}
    theirs = {"name": "look", "description": None, "arguments": None, "parameters": {"city": "x"}}
    both = [
        [*TALK[:2], {**TALK[2], "tool_calls": [{**CALLED, "function": function}]}, *TALK[3:]]
        for function in (call, theirs)
    ]
    ours = outcome(route, {"messages": both[0], "tools": [LOOK], "tool_choice": BY_NAME})
    assert not ours.refusal
    assert outcome(route, {"messages": both[1], "tools": [{**LOOK, "type": None}], "tool_choice": named}) == ours


LOST = {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}}}
LONG = {"type": "object", "description": "a" * (1 << 14)}
FORCED: list[tuple[str, dict[str, Any], Callable[[Any], Any], Sequence[Any]]] = [
    ("openai_chat", {"messages": [USER]}, lambda schema: {"function": {**LOOK["function"], "parameters": schema}},
     ("required", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [BY_NAME]}}, BY_NAME)),
    ("openai_responses", {"input": "a"}, lambda schema: {**FLAT, "parameters": schema},
     ("required", {"type": "allowed_tools", "mode": "required", "tools": [FLAT_NAME]}, FLAT_NAME)),
    ("anthropic_messages", {"messages": [USER], "max_tokens": 4}, lambda schema: {**MINE, "input_schema": schema},
     ({"type": "any"}, {"type": "tool", "name": "look"})),
]  # fmt: skip


@in_one_test(("route", "body", "tool", "choices"), FORCED)
def test_a_forced_call_is_refused_in_the_clients_own_words(route: str, body: Any, tool: Any, choices: Any) -> None:
    lacking = replace(CAPABLE, unsupported={"structured_output": "it has none"})
    for choice in choices:
        forced = {**body, "tools": [tool(LOST)], "tool_choice": choice}
        own = f"tool_choice={show(choice)}"
        if "name" not in choice and choice != BY_NAME:
            assert outcome(route, forced).refusal.startswith(f"{own}: a tool's $ref")
        assert outcome(route, {**forced, "tools": [tool(LONG)]}).refusal.startswith(f"tools: for {own}, their schemas")
        found = outcome(route, {**forced, "tools": [tool(CITY)]}, lacking).refusal
        assert found == f"{own}: the engine able does not support it: it has none"

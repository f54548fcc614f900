"""Whatever is sent to OpenAI's dialects, they read it or refuse it; whatever a model says, none of it is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import ServingError
from handler.protocols.assistant.events import CallStart, Event
from handler.protocols.assistant.tools.parsing import CallParser
from handler.protocols.base import Schema
from handler.protocols.openai.parameters import CHAT as CHAT_TABLE
from handler.protocols.openai.parameters import COMPLETIONS as COMPLETIONS_TABLE
from handler.protocols.readers.messages import ROLES
from tests.unit.protocols.openai.requests import CHAT, COMPLETIONS, NAMED

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=9)
values = st.recursive(
    scalars | st.sampled_from([0, 1, 2, "", "auto", "required", "none", "function", "json_schema", {}, []]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=5)
            | st.sampled_from(["type", "function", "name", "schema", "value", "$defs", "include_usage"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"]) | values},
    optional={"parameters": values, "description": values, "strict": values},
)
tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}) | values, max_size=2)
calls = st.lists(st.fixed_dictionaries({"function": functions}, optional={"id": values}) | values, max_size=2)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES) | values, "content": st.text(max_size=5) | values},
    optional={"tool_calls": calls | values, "tool_call_id": values, "name": values},
)
chats = st.fixed_dictionaries(
    {"messages": st.lists(message | values, max_size=3) | values},
    optional=dict.fromkeys([*CHAT_TABLE.parameters, "model", "stream", "stream_options", "tool_choice"], values)
    | {"tools": tools | values},
)
completions = st.fixed_dictionaries(
    {"prompt": st.text(max_size=5) | st.lists(st.integers(-1, 7), max_size=3) | values},
    optional=dict.fromkeys([*COMPLETIONS_TABLE.parameters, "model", "stream", "stream_options", "other"], values),
)


def check(schema: Schema, body: Any) -> None:
    asked = json.dumps(body)
    try:
        call = schema.parse(body, NAMED)
    except ServingError as error:
        answer = schema.refused(error, body)
        assert answer.status in (400, 404)
        assert json.loads(answer.body)["error"]["message"]
    else:
        assert call.requests
    assert json.dumps(body) == asked, "the client's own value is left as it is"


@given(body=chats | values)
def test_chats(body: Any) -> None:
    check(CHAT, body)


@given(body=completions | values)
def test_completions(body: Any) -> None:
    check(COMPLETIONS, body)


bits = st.sampled_from(
    [
        *"<tool_call>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "',
        '"',
        "f",
        '", "arguments": {',
        "}",
        "[",
        "]",
        ",",
        " ",
        "é",
    ]
)


@pytest.mark.parametrize("inside", [False, True])
@given(parts=st.lists(bits, max_size=30), data=st.data())
def test_the_pieces_do_not_depend_on_how_the_text_comes(inside: bool, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, whole = _read(pieces, inside), _read([text], inside)
    assert found == whole
    if not any(isinstance(piece, tuple) for piece in whole) and not inside and "<tool_call>" not in text:
        assert "".join(map(str, whole)) == text


def _read(texts: list[str], inside: bool) -> list[str | tuple[str, str]]:
    """Text, and calls with their arguments, each as a whole."""
    parser = CallParser("<tool_call>", "</tool_call>", inside=inside)
    pieces: list[Event] = [piece for text in texts for piece in parser.feed(text)]
    found: list[str | tuple[str, str]] = []
    for piece in [*pieces, *parser.flush()]:
        if isinstance(piece, CallStart):
            found.append((piece.name, ""))
            continue
        last = found.pop() if found else None
        if isinstance(piece, str):
            found += [last + piece] if isinstance(last, str) else [piece] if last is None else [last, piece]
        else:
            calls = [one for one in (*found, last) if isinstance(one, tuple)]
            assert calls, "arguments belong to a call"
            assert isinstance(last, tuple), "nothing comes between a call and its arguments"
            found.append((last[0], last[1] + piece.text))
    return found

"""Whatever is sent to OpenAI's dialects, they read it or refuse it; whatever a model says, none of it is lost."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import ServingError
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.messages import ROLES
from handler.protocols.openai.request import CHAT as CHAT_TABLE
from handler.protocols.openai.request import COMPLETIONS as COMPLETIONS_TABLE
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


def check(schema: Dialect, body: Any) -> None:
    asked = json.dumps(body)
    try:
        call = schema.parse(body, NAMED)
    except ServingError as error:
        answer = schema.errors_of(body, NAMED).whole(error)
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

"""Whatever is sent as messages or responses is read or refused in their own form, and what is read can be answered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.protocols.anthropic.request import TABLE as MESSAGES
from handler.protocols.responses.request import TABLE as RESPONSES
from tests.unit.protocols.answers import CAPABLE, answer
from tests.unit.protocols.anthropic.golden import THOUGHT, TWO
from tests.unit.protocols.openai.requests import saying
from tests.unit.protocols.openai.test_fuzz import functions, values

TEMPLATE = "{% if enable_thinking %}<think></think>{{ tools, reasoning_effort }}<tool_call>"
THINKS = replace(CAPABLE, chat_template=TEMPLATE, structural_tags=frozenset({"json"}))

texts = st.text(max_size=5)
any_text, ids = texts | values, st.sampled_from(["a", "b"]) | values
objects = st.dictionaries(texts, values, max_size=2)


def one_of(*names: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(names) | values


blocks = st.fixed_dictionaries(
    {"type": one_of("text", "thinking", "tool_use", "tool_result", "image")},
    optional={
        "text": any_text, "thinking": any_text, "id": ids, "tool_use_id": ids, "name": any_text,
        "input": objects | values, "content": any_text | st.lists(values, max_size=2), "cache_control": values,
    },
)  # fmt: skip
message = st.fixed_dictionaries(
    {"role": one_of("user", "assistant", "system"), "content": texts | st.lists(blocks | values, max_size=3) | values}
)
own_tools = st.fixed_dictionaries(
    {"name": one_of("f", "g"), "input_schema": objects | values}, optional={"type": values, "strict": values}
)
messages = st.fixed_dictionaries(
    {"max_tokens": st.just(9) | values, "messages": st.lists(message | values, max_size=3) | values},
    optional=dict.fromkeys(
        [*(MESSAGES.parameters.keys() - {"max_tokens"}), "model", "stream", "cache_control", "metadata", "other"],
        values,
    )
    | {
        "system": any_text | st.lists(blocks, max_size=2),
        "thinking": st.fixed_dictionaries(
            {"type": one_of("enabled", "adaptive", "disabled")}, optional={"budget_tokens": values, "display": values}
        )
        | values,
        "tools": st.lists(own_tools | values, max_size=2) | values,
        "tool_choice": st.fixed_dictionaries({"type": one_of("any", "tool")}, optional={"name": values}) | values,
        "stream": st.booleans(),
    },
)

parts = st.fixed_dictionaries({"type": one_of("input_text", "output_text", "refusal"), "text": any_text}) | values
items = st.fixed_dictionaries(
    {"type": one_of("message", "function_call", "function_call_output", "reasoning", "item_reference")},
    optional={
        "role": one_of("user", "assistant", "developer"), "content": texts | st.lists(parts, max_size=2) | values,
        "call_id": ids, "name": any_text, "arguments": one_of("{}", "[]"), "output": any_text, "summary": values,
        "namespace": any_text,
    },
)  # fmt: skip
tool = st.fixed_dictionaries({"type": one_of("function")}, optional={"name": one_of("f"), "parameters": values})
responses = st.fixed_dictionaries(
    {"input": texts | st.lists(items | values, max_size=3) | values},
    optional=dict.fromkeys([*RESPONSES.parameters, "model", "metadata", "instructions", "other"], values)
    | {
        "tools": st.lists(
            tool
            | functions
            | st.fixed_dictionaries({"type": st.just("namespace"), "name": any_text, "tools": st.lists(tool)})
            | values,
            max_size=2,
        )
        | values,
        "tool_choice": st.fixed_dictionaries({"type": one_of("function")}, optional={"name": values}) | values,
        "reasoning": st.fixed_dictionaries({}, optional={"effort": one_of("low"), "summary": values}) | values,
        "stream": st.booleans(),
    },
)


def check(schema: str, body: Any, said: str) -> None:
    found = answer(schema, body, saying(said), THINKS)
    if found.status == 200 and "event-stream" in found.content_type:
        assert found.body.startswith(b"event: ")
        return
    value = json.loads(found.body)
    assert found.status in (200, 400, 404)
    assert found.status == 200 or value["error"]["message"]


SAID = st.sampled_from(["", "Yes.", THOUGHT, TWO, "<think>", "<tool_call>", "\n"])


@pytest.mark.parametrize("schema", ["anthropic_messages", "anthropic_count"])
@given(body=messages | values, said=SAID)
def test_messages(schema: str, body: Any, said: str) -> None:
    check(schema, body, "" if schema == "anthropic_count" else said)  # a count has no tokens


@given(body=responses | values, said=SAID)
def test_responses(body: Any, said: str) -> None:
    check("openai_responses", body, said)

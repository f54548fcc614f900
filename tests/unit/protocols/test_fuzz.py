"""Bodies and answers of any kind: each body is read or refused in its dialect's form, and no answer is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import ServingError
from handler.protocols.anthropic.types import TABLE as MESSAGES
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.messages import ROLES
from handler.protocols.llamacpp.tokenize import APPLY_TEMPLATE
from handler.protocols.llamacpp.tokenize import TOKENIZE as LLAMA_TOKENIZE
from handler.protocols.openai.request import CHAT as CHAT_TABLE
from handler.protocols.openai.request import COMPLETIONS as COMPLETIONS_TABLE
from handler.protocols.registry import dialects_of
from handler.protocols.responses.types import ITEMS
from handler.protocols.responses.types import TABLE as RESPONSES
from handler.protocols.vllm.tokenize import DETOKENIZE, TOKENIZE, TOKENIZE_CHAT
from tests.unit.protocols.answers import CAPABLE, CHAT, COMPLETIONS, DIALECTS, NAMED, answer, saying
from tests.unit.protocols.golden.anthropic import THOUGHT, TWO

# -- chat --------------------------------------------------------------------------------------------------------------
# Whatever is sent to OpenAI's dialects, they read it or refuse it; whatever a model says, none of it is lost.


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
chat_message = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES) | values, "content": st.text(max_size=5) | values},
    optional={"tool_calls": calls | values, "tool_call_id": values, "name": values},
)
chats = st.fixed_dictionaries(
    {"messages": st.lists(chat_message | values, max_size=3) | values},
    optional=dict.fromkeys([*CHAT_TABLE.parameters, "model", "stream", "stream_options", "tool_choice"], values)
    | {"tools": tools | values},
)
completions = st.fixed_dictionaries(
    {"prompt": st.text(max_size=5) | st.lists(st.integers(-1, 7), max_size=3) | values},
    optional=dict.fromkeys([*COMPLETIONS_TABLE.parameters, "model", "stream", "stream_options", "other"], values),
)


def chat_check(schema: Dialect, body: Any) -> None:
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
    chat_check(CHAT, body)


@given(body=completions | values)
def test_completions_in_fuzz(body: Any) -> None:
    chat_check(COMPLETIONS, body)


# -- fuzz of blocks ----------------------------------------------------------------------------------------------------
# Whatever is sent as messages or responses is read or refused in their own form, and what is read can be answered.


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
OF_ITEMS = {
    "role": one_of("user", "assistant", "developer"), "content": texts | st.lists(parts, max_size=2) | values,
    "call_id": ids, "name": any_text, "arguments": one_of("{}", "[]"), "input": any_text, "output": any_text,
    "namespace": any_text, "author": any_text, "recipient": any_text,
}  # fmt: skip
RECORDED = ("id", "call_id", "approval_request_id", "arguments", "action", "output", "result")


def item_of(kind: str) -> st.SearchStrategy[Any]:
    declared = ITEMS[kind].fields
    names = RECORDED if declared is None else declared.fields
    return st.fixed_dictionaries({"type": st.just(kind)}, optional={name: OF_ITEMS.get(name, values) for name in names})


items = st.sampled_from([*ITEMS]).flatmap(item_of) | st.fixed_dictionaries({"type": one_of("item_reference")})
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


# -- bodies for embeddings, ranks, labels and tokens: each is read, or refused in its dialect's form -------------------


POOLED = ["openai_embeddings", "lmi_embedding", "tei_embed", "tei_similarity", "tei_rerank", "tei_predict", "rerank"]
DECLARED: dict[str, Any] = {
    **{name: DIALECTS[name] for name in POOLED},
    **{schema.name: schema for schema in (TOKENIZE, TOKENIZE_CHAT, DETOKENIZE, LLAMA_TOKENIZE, APPLY_TEMPLATE)},
}


def own_names(*dialects: Any) -> list[str]:
    return sorted({name for one in dialects for name in (*one.fields, *one.table.parameters)})


OWN_NAMES = {dialect: own_names(*dialects_of(schema)) for dialect, schema in DECLARED.items()}
NAMES = sorted({"text", "source_sentence", "sentences", "role", "content"}.union(*OWN_NAMES.values()))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False), st.sampled_from(["", "a"]))
VALUE = st.recursive(
    PLAIN, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(NAMES), part, max_size=3)
)


@pytest.mark.parametrize("dialect", DECLARED)
@given(data=st.data())
def test_any_body_is_read_or_refused(dialect: str, data: st.DataObject) -> None:
    names = st.sampled_from(OWN_NAMES[dialect]) | st.sampled_from(NAMES)
    body = data.draw(VALUE | st.dictionaries(names, VALUE, max_size=6))
    schema = DECLARED[dialect]
    try:
        call = schema.parse(body, CAPABLE)
    except ServingError as error:
        found = schema.errors_of(body, CAPABLE).whole(error)
        assert 400 <= found.status < 500
        assert json.loads(found.body)
    else:
        if dialect in POOLED:
            assert call.requests
            assert all(request.pooling is not None and request.prompt for request in call.requests)

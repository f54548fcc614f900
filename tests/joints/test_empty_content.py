"""Empty contents, arguments and outputs: an empty list, null or nothing is an empty text in every API.

vLLM joins zero parts to "", and takes null and nothing for an empty list (`entrypoints/chat_utils.py`). Clients send
each of them beside tool calls: Rust's rig an empty list, OpenAI's client null, others nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handler.core.values import Objects
from handler.protocols.vllm.tokenize import TOKENIZE_CHAT
from tests.app.server import serve
from tests.doubles import tiny
from tests.unit.protocols.answers import CAPABLE, DIALECTS

USER = {"role": "user", "content": "a"}
EMPTY: dict[str, Any] = {"an empty text": "", "an empty list": [], "null": None, "nothing": ...}
"""Values of a field; an ellipsis stands for a body without it."""


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "f", **arguments}}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages], "max_tokens": 4}


CALLED = {"role": "assistant", "content": "c", "tool_calls": [call(arguments="{}")]}
CHATS = {
    "a user's content": lambda **content: chat({"role": "user", **content}),
    "a system's content": lambda **content: chat({"role": "system", **content}, USER),
    "a developer's content": lambda **content: chat({"role": "developer", **content}, USER),
    "an assistant's content": lambda **content: chat(USER, {"role": "assistant", **content}, USER),
    "a call's content": lambda **content: chat(USER, {**CALLED, "content": "", **content}, USER),
    "a result": lambda **content: chat(USER, CALLED, {"role": "tool", "tool_call_id": "x", **content}),
    "a call's arguments": lambda **arguments: chat(
        USER, {"role": "assistant", "tool_calls": [call(**_as("arguments", arguments))]}, USER
    ),
}
USED = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
MESSAGES = {
    "a user's content": lambda **content: chat({"role": "user", **content}),
    "a system's content": lambda **content: chat(USER, {"role": "system", **content}, USER),
    "an assistant's content": lambda **content: chat(USER, {"role": "assistant", **content}, USER),
    "the last message, an assistant's": lambda **content: chat(USER, {"role": "assistant", **content}),
    "a call's arguments": lambda **given: chat(
        USER, {"role": "assistant", "content": [{**without(USED, "input"), **_as("input", given, text={})}]}, USER
    ),
    "a result": lambda **content: chat(
        USER,
        {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", **content}]},
    ),
}
FUNCTION = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "x", "name": "f", "input": ""}
RESPONSES = {
    "a user's content": lambda **content: {"input": [{"role": "user", **content}]},
    "a system's content": lambda **content: {"input": [{"role": "system", **content}, USER]},
    "an assistant's content": lambda **content: {"input": [USER, {"role": "assistant", **content}, USER]},
    "a call's arguments": lambda **given: {
        "input": [USER, {**without(FUNCTION, "arguments"), **_as("arguments", given)}, USER]
    },
    "a custom call's input": lambda **given: {
        "input": [USER, {**without(CUSTOM, "input"), **_as("input", given)}, USER]
    },
    "a result": lambda **given: {
        "input": [USER, FUNCTION, {"type": "function_call_output", "call_id": "x", **_as("output", given)}]
    },
    "a custom call's result": lambda **given: {
        "input": [USER, CUSTOM, {"type": "custom_tool_call_output", "call_id": "x", **_as("output", given)}]
    },
}


def _as(name: str, given: dict[str, Any], text: Any = "") -> dict[str, Any]:
    """The field under another name; `text` replaces an empty text where the field has another type."""
    return dict.fromkeys([name] * bool(given), *(text if value == "" else value for value in given.values()))


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


CASES = [
    *(pytest.param(dialect, make, id=f"{dialect}, {place}") for dialect in ("openai_chat", "lmi", "vllm_tokenize_chat")
      for place, make in CHATS.items()),
    *(pytest.param("anthropic_messages", make, id=f"anthropic, {place}") for place, make in MESSAGES.items()),
    *(pytest.param("openai_responses", make, id=f"responses, {place}") for place, make in RESPONSES.items()),
]  # fmt: skip


def messages(dialect: str, body: dict[str, Any]) -> Objects:
    parser = TOKENIZE_CHAT if dialect == "vllm_tokenize_chat" else DIALECTS[dialect]
    (request,) = parser.parse(body, CAPABLE).requests
    return request.messages


@pytest.mark.parametrize(("dialect", "make"), CASES)
def test_nothing_is_an_empty_text(dialect: str, make: Any) -> None:
    found = {
        name: messages(dialect, make(**({} if value is ... else {"content": value}))) for name, value in EMPTY.items()
    }
    assert all(found.values())
    assert all(one == found["an empty text"] for one in found.values()), found


@pytest.mark.parametrize("value", [0, False, {}, 1.5])
@pytest.mark.parametrize(("dialect", "place"), [("openai_chat", CHATS), ("anthropic_messages", MESSAGES)])
def test_a_value_of_another_type_is_refused(dialect: str, place: dict[str, Any], value: Any) -> None:
    with pytest.raises(Exception, match=r"messages\[0\]\.content must be a string or a list of"):
        messages(dialect, place["a user's content"](content=value))


def test_a_server_answers_and_stores_them() -> None:
    """Whole requests: stored items without content are read again."""
    with serve("--engine", "echo", "-o", "option.responses_store=memory") as server:
        for path in ("/v1/chat/completions", "/invocations"):
            body = chat(USER, {**CALLED, "content": []}, {"role": "tool", "tool_call_id": "x", "content": "8"})
            assert server.post(body, path).status_code == 200
        first = server.post({"input": [{"role": "user"}, USER], "max_output_tokens": 4}, "/v1/responses")
        assert first.status_code == 200, first.text
        again = {"input": "b", "previous_response_id": first.json()["id"], "max_output_tokens": 4}
        second = server.post(again, "/v1/responses")
        assert second.status_code == 200, second.text
        begun = {**chat({"role": "user"}, USER), "thread": {"type": "create"}}
        assert server.post(begun, "/v1/messages").status_code == 200


# -- roles that a chat template knows ----------------------------------------------------------------------------------


GRANITE = (
    "{% for m in messages %}{% if m['role'] == 'control' %}<think>{% elif m.role in [\"document\", 'critic'] %}"
    "<doc>{{ m.content }}{% elif m.role.startswith('page ') %}{{ m.role }}{% else %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["control", "document", "critic", "page 1"])
@pytest.mark.parametrize("dialect", ["openai_chat", "lmi", "vllm_tokenize_chat", "openai_responses"])
def test_a_role_of_the_template_reaches_it(dialect: str, role: str) -> None:
    told = [{"role": role, "content": "thinking"}, USER]
    body = {"input": told} if dialect == "openai_responses" else chat(*told)
    parser = TOKENIZE_CHAT if dialect == "vllm_tokenize_chat" else DIALECTS[dialect]
    (request,) = parser.parse(body, replace(CAPABLE, chat_template=GRANITE)).requests
    assert [(message["role"], message["content"]) for message in request.messages] == [
        (role, "thinking"),
        ("user", "a"),
    ]


def test_a_role_and_no_content_reach_the_prompt(tmp_path: Path) -> None:
    model, template = tmp_path / "model", tmp_path / "template"
    model.mkdir()
    tiny.make(model)
    template.write_text(GRANITE)
    options = ("-o", f"option.echo_tokenizer={model}", "-o", f"option.chat_template={template}")
    with serve("--engine", "echo", *options) as server:
        found = server.post(chat({"role": "control", "content": "on"}, {"role": "user"}, USER), "/tokenize").json()
        prompt = server.post({"tokens": found["tokens"]}, "/detokenize").json()["prompt"]
    assert prompt.startswith("<think><user><user>a")


@pytest.mark.parametrize("dialect", ["openai_chat", "lmi", "openai_responses"])
def test_another_role_is_refused_with_those_that_are_known(dialect: str) -> None:
    told = [{"role": "usr", "content": "a"}]
    body = {"input": told} if dialect == "openai_responses" else chat(*told)
    with pytest.raises(
        Exception, match=r"\[0\]\.role must be one of .*assistant.*, control, critic, document"
    ) as found:
        DIALECTS[dialect].parse(body, replace(CAPABLE, chat_template=GRANITE))
    assert "usr" not in str(found.value)
    with pytest.raises(Exception, match=r"\[0\]\.role must be one of .*assistant.*(developer|tool)$"):
        DIALECTS[dialect].parse(body, CAPABLE)

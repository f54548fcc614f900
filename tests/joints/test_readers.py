"""Readers of requests: parts of contents, and numbers that are of another type."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidPayload
from handler.core.values import Request
from handler.protocols.vllm.tokenize import TOKENIZE_CHAT
from tests.app.server import serve
from tests.clients import toolchains
from tests.one_test import in_one_test
from tests.servers import LiveServer
from tests.unit.protocols.answers import CAPABLE, DIALECTS

# -- content parts -----------------------------------------------------------------------------------------------------
# Parts of contents: chats, LMI's chats, /tokenize and Responses read the same parts, and refuse the same by name.
#
# Which types there are is read from the clients of OpenAI and Anthropic, by `declared_types`; vLLM's are in its
# entrypoints/chat_utils.py.


SEEING = replace(CAPABLE, no_media={"image": "", "audio": ""})
READING = replace(CAPABLE, no_media=dict.fromkeys(("image", "audio"), "the model takes text only"))
CHATS = {"openai_chat": DIALECTS["openai_chat"], "lmi": DIALECTS["lmi"], "vllm_tokenize_chat": TOKENIZE_CHAT}
RESPONSES = "openai_responses"
URL = "data:image/png;base64,aQ=="
WAV = {"data": "aQ==", "format": "wav"}
AUDIO = {"type": "input_audio", "input_audio": WAV}
THOUGHT = {"type": "thinking", "thinking": "a", "closed": True}
"""As Mistral's clients have it."""

TEXTS: dict[str, Any] = {
    "text": {"type": "text", "text": "a"},
    "refusal": {"type": "refusal", "refusal": "a"},
    "input_text": {"type": "input_text", "text": "a"},
    "output_text": {"type": "output_text", "text": "a", "annotations": []},
    "thinking": THOUGHT,
    "reasoning_text": {"type": "reasoning_text", "text": "a"},
    "summary_text": {"type": "summary_text", "text": "a"},
    "tool_reference": {"type": "tool_reference", "name": "a"},
    "a string": "a",
}
MEDIA: dict[str, Any] = {
    "image_url": {"type": "image_url", "image_url": {"url": URL}},
    "image_url of vLLM": {"type": "image_url", "image_url": URL},
    "image_url without a type": {"image_url": URL, "uuid": "u"},
    "input_image": {"type": "input_image", "image_url": URL, "detail": "high"},
    "audio_url": {"type": "audio_url", "audio_url": {"url": URL.replace("image", "audio")}},
    "input_audio": AUDIO,
}
REFUSED: dict[str, Any] = {
    "file": ({"type": "file", "file": {"file_id": "f"}}, "the engine reads only text, images and audio clips"),
    "input_file": ({"type": "input_file", "file_id": "f"}, "the engine reads only text, images and audio clips"),
    "video_url": ({"type": "video_url", "video_url": {"url": URL}}, "the engine reads only text"),
    "input_video": ({"type": "input_video"}, "the engine reads only text"),
    "image": ({"type": "image"}, "send the image as an 'image_url'"),
    "image_pil": ({"type": "image_pil", "image_pil": None}, "send the image as an 'image_url'"),
    "image_embeds": ({"type": "image_embeds", "image_embeds": "aQ=="}, "send the image itself"),
    "audio_embeds": ({"type": "audio_embeds", "audio_embeds": "aQ=="}, "send the audio itself"),
    "prompt_embeds": ({"type": "prompt_embeds", "data": "aQ=="}, "send the text itself"),
    "computer_screenshot": ({"type": "computer_screenshot", "image_url": URL}, "send the image itself"),
    "poem": ({"type": "poem", "text": "a"}, "the type must be one of text, refusal, "),
}
"""By type: a part, and what to do instead."""


def chat(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def read(name: str, body: dict[str, Any], context: Any = SEEING) -> tuple[Request, list[str]]:
    """What a dialect reads of a chat, and what it ignores; Responses get the messages as their input."""
    if name == RESPONSES:
        (request,), _, _, ignored, *_ = DIALECTS[RESPONSES].parse({"input": body["messages"]}, context)
    else:
        (request,), _, _, ignored, *_ = CHATS[name].parse(body, context)
    return request, [one.replace("input[]", "messages[]") for one in ignored]


def refusal(name: str, body: dict[str, Any], context: Any = SEEING) -> str:
    """Why a dialect refuses a chat, as a chat's path has it."""
    dialect = DIALECTS[RESPONSES] if name == RESPONSES else CHATS[name]
    with pytest.raises(InvalidPayload) as raised:
        dialect.parse({"input": body["messages"]} if name == RESPONSES else body, context)
    return raised.value.message.replace("input[0].", "messages[0].", 1)


@in_one_test("dialect", [*CHATS, RESPONSES])
@in_one_test("role", ["user", "assistant", "system"])
@in_one_test("name", TEXTS)
def test_a_part_of_text_is_the_same_prompt_everywhere(dialect: str, role: str, name: str) -> None:
    request, ignored = read(dialect, chat(TEXTS[name], {"type": "text", "text": "b"}, role=role))
    assert [dict(message) for message in request.messages] == [{"role": role, "content": "a\nb"}]
    assert ignored == []


@in_one_test("name", MEDIA)
def test_a_medium_is_the_same_prompt_everywhere(name: str) -> None:
    body = chat({"type": "text", "text": "a"}, MEDIA[name])
    read_by_chats = [
        (request.messages, request.media, ignored) for request, ignored in (read(one, body) for one in CHATS)
    ]
    assert read_by_chats[1:] == read_by_chats[:1] * 2
    request, ignored = read(RESPONSES, body)
    kind = "audio" if "audio" in name else "image"
    assert (
        request.messages
        == read_by_chats[0][0]
        == ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]},)
    )
    assert [(source.kind, source.data) for source in request.media] == [(kind, b"i")]
    assert ignored == read_by_chats[0][2]


CALLED = {"role": "assistant", "tool_calls": [{"id": name, "function": {"name": "see"}} for name in "cd"]}
IMAGE, SOUND = {"type": "image"}, {"type": "audio"}
TOOLED = replace(SEEING, chat_template="{{ tools }}{% for m in messages %}{{ m.tool_calls }}<tool_call>{% endfor %}")


@in_one_test("dialect", CHATS)
def test_media_in_results_are_shown_after_them_as_by_the_other_apis(dialect: str) -> None:
    """Chat templates accept only text in results; Responses and Anthropic's messages move media in the same way."""
    seen = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, MEDIA["image_url"]]}
    heard = {"role": "tool", "tool_call_id": "d", "content": [AUDIO, {"type": "text", "text": "b"}]}
    before = [{"role": "user", "content": "q"}, CALLED, seen, heard]
    results = [{**seen, "content": "a"}, {**heard, "content": "b"}]
    text, shown = {"type": "text", "text": "c"}, {"role": "user", "content": [IMAGE, SOUND]}
    ending: list[tuple[list[Any], list[Any]]] = [
        ([], [shown]),
        ([{"role": "user", "content": "c"}], [{"role": "user", "content": [IMAGE, SOUND, text]}]),
        (
            [{"role": "user", "content": [text, MEDIA["image_url"]]}],
            [{"role": "user", "content": [IMAGE, SOUND, text, IMAGE]}],
        ),
        (
            [{"role": "assistant", "content": "c"}, results[0]],
            [shown, {"role": "assistant", "content": "c"}, results[0]],
        ),
    ]
    for after, wanted in ending:
        request, ignored = read(dialect, {"messages": [*before, *after]}, TOOLED)
        messages = [dict(message) for message in request.messages]
        assert [message for message in messages if message["role"] == "tool"][:2] == results
        assert messages[4:] == wanted
        assert [source.kind for source in request.media][:2] == ["image", "audio"]
        assert ignored == []


@in_one_test("dialect", CHATS)
@in_one_test("role", ["user", "assistant", "system", "developer", "tool"])
def test_the_name_of_a_message_is_the_templates(dialect: str, role: str) -> None:
    """As in vLLM: Kimi K2's template writes it in place of the role."""
    request, ignored = read(dialect, {"messages": [{"role": role, "name": "Ann", "content": "a"}]}, TOOLED)
    assert request.messages[0]["name"] == "Ann"
    assert ignored == []
    request, _ = read(dialect, {"messages": [{"role": role, "name": None, "content": "a"}]}, TOOLED)
    assert "name" not in request.messages[0]
    with pytest.raises(InvalidPayload, match=r"messages\[0\].name must be a string"):
        CHATS[dialect].parse({"messages": [{"role": role, "name": 1, "content": "a"}]}, SEEING)


@in_one_test("dialect", [*CHATS, RESPONSES])
@in_one_test("name", REFUSED)
def test_a_part_that_is_not_read_is_refused_by_its_name(dialect: str, name: str) -> None:
    part, instead = REFUSED[name]
    message = refusal(dialect, chat(TEXTS["text"], part))
    assert message.startswith(f"messages[0].content[1]: '{name}' is not supported: ")
    assert instead in message
    assert message == refusal("openai_chat", chat(TEXTS["text"], part))


@in_one_test("dialect", [*CHATS, RESPONSES])
@in_one_test("name", [name for name in MEDIA if " " not in name])
def test_a_model_of_text_says_so(dialect: str, name: str) -> None:
    message = f"messages[0].content[0]: '{name}' is not supported: the model takes text only"
    assert refusal(dialect, chat(MEDIA[name]), READING) == message


@in_one_test("dialect", [*CHATS, RESPONSES])
@in_one_test(
    ("part", "message"),
    [(1, "messages[0].content[0] must be a string, or an object with a 'type', such as 'text'"),
     ({}, "messages[0].content[0] must be a string, or an object with a 'type', such as 'text'"),
     ({"type": ["text"]}, "messages[0].content[0] must be a string, or an object with a 'type', such as 'text'"),
     ({"type": "text", "text": 1}, "messages[0].content[0]: 'text' must have a string 'text'"),
     ({"type": "refusal", "text": "a", "refusal": 1}, "messages[0].content[0]: 'refusal' must have a string 'refusal'"),
     ({"type": "thinking"}, "messages[0].content[0]: 'thinking' must have a string 'thinking'"),
     ({"type": "input_image", "file_id": "f"}, "messages[0].content[0].file_id is not supported: files are not stored; "
      "send image_url"),
     ({"type": "input_audio"}, "messages[0].content[0].input_audio must be an object with 'data' (the file in base64) "
      "and 'format'")],
)  # fmt: skip
def test_what_is_wrong_in_a_part_is_named(dialect: str, part: Any, message: str) -> None:
    assert refusal(dialect, chat(part)) == message


@in_one_test("dialect", [*CHATS, RESPONSES])
@in_one_test("word", ["text", "refusal"])
def test_a_part_without_its_text_is_left_out_as_in_vllm(dialect: str, word: str) -> None:
    request, ignored = read(dialect, chat({"type": word}, TEXTS["text"]))
    assert [dict(message) for message in request.messages] == [{"role": "user", "content": "a"}]
    assert ignored == [f"messages[].content[].{word}"]


def test_thoughts_that_only_their_maker_can_read_are_dropped_and_named() -> None:
    secret = {"type": "redacted_thinking", "data": "x"}
    blocks = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [secret, TEXTS["text"]]}]
    body = {"model": "model", "max_tokens": 4, "messages": [*blocks, blocks[0]]}
    (request,), _, _, ignored, *_ = DIALECTS["anthropic_messages"].parse(body, SEEING)
    thought = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    items = [blocks[0], thought, {"role": "assistant", "content": "a"}, blocks[0]]
    (same,), _, _, ignored_items, *_ = DIALECTS[RESPONSES].parse({"input": items}, SEEING)
    assert request.messages == same.messages
    assert [dict(message) for message in same.messages][1] == {"role": "assistant", "content": "a"}
    assert ignored == ["messages[].content[].redacted_thinking"]
    assert ignored_items == ["input[].encrypted_content"]


_DECLARED = """
import json, typing
import anthropic.types, openai.types.chat as chat, openai.types.responses as responses

def types(part):
    "The types of a part's parameters, or of those of a union or list."
    if typing.is_typeddict(part) or hasattr(part, "__total__"):
        return list(typing.get_args(typing.get_type_hints(part).get("type")))
    return [name for one in typing.get_args(part) for name in types(one)]

def contents(*messages):
    return [name for one in messages for name in types(typing.get_type_hints(one)["content"])]

print(json.dumps({
    "chats": contents(*typing.get_args(chat.ChatCompletionMessageParam)),
    "responses": contents(responses.EasyInputMessageParam, responses.ResponseOutputMessageParam),
    "anthropic": contents(*typing.get_args(anthropic.types.MessageParam) or [anthropic.types.MessageParam]),
}))
"""


@pytest.fixture(scope="module")
def declared() -> dict[str, list[str]]:
    """The types of parts that the clients' own parameters have, each client in its environment."""
    found = subprocess.run([toolchains.python("openai"), "-c", _DECLARED], check=True, capture_output=True, text=True)
    types: dict[str, list[str]] = json.loads(found.stdout)
    return types


@pytest.mark.timeout(600)  # a first run builds the environment
def test_every_type_that_a_client_declares_is_read_or_refused_by_name(declared: dict[str, list[str]]) -> None:
    known = {name: part for name, part in {**TEXTS, **MEDIA}.items() if isinstance(part, dict)}
    assert {"text", "refusal", "image_url", "input_audio", "file"} <= set(declared["chats"])
    assert {"input_text", "output_text", "input_image", "input_file"} <= set(declared["responses"])
    for word in declared["chats"] + declared["responses"]:
        assert word in known or word in REFUSED, word
    assert {"text", "thinking", "redacted_thinking", "document", "tool_use"} <= set(declared["anthropic"])
    for word in declared["anthropic"]:
        for role in ("user", "assistant"):
            body = {"model": "model", "max_tokens": 4, "messages": [{"role": role, "content": [{"type": word}]}]}
            with pytest.raises(InvalidPayload) as raised:
                DIALECTS["anthropic_messages"].parse(body, SEEING)
            named = f"messages[0].content[0]: '{word}' is not supported: "
            assert raised.value.message.startswith((named, "messages[0].content[0].", "messages[0]: the response"))


# -- numbers -----------------------------------------------------------------------------------------------------------
# What reads a request × what writes its answer: a number or flag of another type changes nothing in the answer.


CHAT = {"messages": [{"role": "user", "content": "a b c"}]}
OWN = re.compile(r'"(?:id|created|created_at|completed_at|system_fingerprint|item_id)":\s*(?:"[^"]*"|\d+)')
"""What every answer has of its own."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Mapping[str, LiveServer]]:
    with (
        serve("--engine", "echo") as rolling,
        serve("--engine", "echo", "-o", "option.async_mode=true") as asynchronous,
    ):
        yield {"rolling": rolling, "async": asynchronous}


def answer(server: LiveServer, path: str, body: Mapping[str, Any]) -> tuple[int, str, str]:
    found = server.post(body, path)
    return found.status_code, found.headers.get("x-lmi-ignored-parameters", ""), OWN.sub("", found.text)


@in_one_test(
    ("mode", "path", "body", "same"),
    [
        (
            "rolling", "/v1/chat/completions",
            {**CHAT, "max_tokens": 2, "temperature": 0, "logprobs": True, "top_logprobs": 1},
            {**CHAT, "max_tokens": "2", "temperature": "0.0", "logprobs": "yes", "top_logprobs": 1.0},
        ),
        (
            "rolling", "/v1/chat/completions",
            {**CHAT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
            {**CHAT, "max_tokens": 2.0, "stream": "true", "stream_options": {"include_usage": 1}},
        ),
        (
            "rolling", "/v1/completions",
            {"prompt": "a b c", "max_tokens": 0, "echo": True, "stream": False},
            {"prompt": "a b c", "max_tokens": "0", "echo": 1, "stream": 0},
        ),
        (
            "rolling", "/v1/responses",
            {"input": "a b c", "max_output_tokens": 2, "temperature": 0.5, "top_p": 1.0, "parallel_tool_calls": False},
            {"input": "a b c", "max_output_tokens": "2", "temperature": "0.5", "top_p": True, "parallel_tool_calls": 0},
        ),
        (
            "rolling", "/v1/responses",
            {"input": "a b c", "max_output_tokens": 2, "max_tool_calls": 3, "stream": True, "store": False},
            {"input": "a b c", "max_output_tokens": 2.0, "max_tool_calls": "3", "stream": 1, "store": "no"},
        ),
        (
            "rolling", "/v1/messages",
            {**CHAT, "model": "model", "max_tokens": 2, "temperature": 1, "stream": True},
            {**CHAT, "model": "model", "max_tokens": "2", "temperature": True, "stream": "1"},
        ),
        (
            "rolling", "/tokenize",
            {"prompt": "a b c", "return_token_strs": True}, {"prompt": "a b c", "return_token_strs": "true"},
        ),
        (
            "rolling", "/invocations",
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "details": True, "seed": 7}, "stream": True},
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2.0, "details": 1, "seed": "7"}, "stream": 1},
        ),
        (
            "rolling", "/invocations",
            {**CHAT, "max_tokens": 2, "logprobs": True, "stream": True},
            {**CHAT, "max_tokens": "2", "logprobs": 1.0, "stream": "on"},
        ),
        (
            "async", "/invocations",
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "details": True, "seed": 7, "do_sample": False}},
            {"inputs": "a b c", "parameters": {"max_new_tokens": "2", "details": "yes", "seed": 7.0, "do_sample": 0}},
        ),
        ("async", "/invocations", {**CHAT, "max_tokens": 2, "stream": True}, {**CHAT, "max_tokens": "2", "stream": 1}),
        (
            "async", "/invocations",
            {"prompt": "a b c", "max_tokens": 2, "logprobs": 1},
            {"prompt": "a b c", "max_tokens": 2.0, "logprobs": True},
        ),
    ],
)  # fmt: skip
def test_the_answer_is_the_same(
    servers: Mapping[str, LiveServer], mode: str, path: str, body: dict[str, Any], same: dict[str, Any]
) -> None:
    wanted = answer(servers[mode], path, body)
    assert wanted[0] == 200, wanted
    assert answer(servers[mode], path, same) == wanted

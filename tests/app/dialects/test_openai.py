"""OpenAI's routes over real sockets: framing to the byte, keep-alives, failures, models, the demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import handler
from handler.core.media import MEDIA
from handler.serving.media.loader import missing_packages
from tests import servers
from tests.app.server import impatient, serve
from tests.servers import LiveServer, http, options, post_bytes, raw, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "a ü"}], "max_tokens": 3}
COMPLETE = {"prompt": "a b", "max_tokens": 3}
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, ASK), (COMPLETIONS, COMPLETE)])


@pytest.fixture(scope="module")
def paced() -> Iterator[LiveServer]:
    """Fifty tokens a second, with cues for failures, adapters, and a name besides its own."""
    cues = options("option.echo_tokens_per_second=50", "option.echo_cues=true", "option.engine_isolation=process")
    with serve(
        "--engine",
        "echo",
        *cues,
        *options("option.enable_lora=true", "option.adapters_root=/", "option.served_model_name=first, org/x"),
    ) as server:
        server.wait_ready()
        yield server


def events(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return servers.events(server, path, body, end=["data: [DONE]"])


def shown(event: dict[str, Any]) -> str:
    (choice,) = event["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def error(found: httpx.Response, status: int) -> dict[str, Any]:
    assert (found.status_code, found.headers["content-type"]) == (status, "application/json")
    value: dict[str, Any] = found.json()["error"]
    assert value.keys() == {"message", "type", "param", "code"}
    return value


# -- framing -----------------------------------------------------------------------------------------------------


def chunks(body: bytes) -> list[bytes]:
    """The chunks of a body, their sizes checked."""
    found = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        found.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        body = rest[length + 2 :]
    return found


def events_of(body: bytes) -> list[bytes]:
    """The events of a chunked stream that has ended, however they were joined to chunks."""
    *found, end = chunks(body)
    assert end == b""
    *events, rest = b"".join(found).split(b"\n\n")
    assert rest == b""
    return events


def test_a_prompt_on_the_one_door_is_a_completion(echo_server: LiveServer) -> None:
    whole, streamed = echo_server.post(COMPLETE), echo_server.post({**COMPLETE, "stream": True})
    assert whole.json()["object"] == "text_completion"
    assert whole.json()["choices"] == echo_server.post(COMPLETE, COMPLETIONS).json()["choices"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    refused = echo_server.post({**COMPLETE, "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_a_chats_stream_byte_by_byte(paced: LiveServer) -> None:
    body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    head, _, rest = raw(paced, post_bytes(body, CHAT)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    for line in (b"content-type: text/event-stream", b"cache-control: no-cache", b"transfer-encoding: chunked"):
        assert line in head
    first, second, third, *last = events_of(rest)
    id = re.match(rb'data: {"id":"(chatcmpl-[0-9a-f]{32})","object":"chat.completion.chunk","created":(\d{10}),', first)
    assert id is not None
    before = b'data: {"id":"%b","object":"chat.completion.chunk","created":%b,"model":"first",' % id.groups()
    before += b'"system_fingerprint":"lmi-%b-echo","choices":[' % handler.__version__.encode()

    def event(choices: str, usage: str) -> bytes:
        return before + f'{choices}],"usage":{usage}}}'.encode()

    around = '{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}'
    assert first == event(around % ('"role":"assistant","content":" user:"', "null"), "null")
    assert second == event(around % ('"content":" a"', "null"), "null")
    assert third == event(around % ('"content":" ü"', '"length","stop_reason":null'), "null")
    assert last == [event("", '{"prompt_tokens":4,"completion_tokens":3,"total_tokens":7}'), b"data: [DONE]"]


def test_a_completions_stream_byte_by_byte(paced: LiveServer) -> None:
    _, _, rest = raw(paced, post_bytes({**COMPLETE, "stream": True}, COMPLETIONS)).partition(b"\r\n\r\n")
    *found, end = events_of(rest)
    assert end == b"data: [DONE]"
    values = []
    for event in found:
        assert event.startswith(b'data: {"id":"cmpl-')
        values.append(json.loads(event.removeprefix(b"data: ")))
        assert event == b"data: " + json.dumps(values[-1], separators=(",", ":")).encode()
    assert [value["choices"] for value in values] == [
        [{"index": 0, "text": text, "logprobs": None, **end}]
        for text, end in (
            (" a", {"finish_reason": None}),
            (" b", {"finish_reason": None}),
            (" a", {"finish_reason": "length", "stop_reason": None}),
        )
    ]


@BOTH
def test_a_silent_stream_says_that_it_is_there_in_openai(path: str, body: dict[str, Any]) -> None:
    slow = options("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=2")
    with impatient(*slow) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(events, server, path, body)
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        _, _, rest = raw(server, post_bytes({**body, "stream": True}, path)).partition(b"\r\n\r\n")
        found = chunks(rest)
        assert found[0] == b":\n\n"
        assert found.count(b":\n\n") >= 5
        told = [shown(json.loads(chunk[6:].split(b"\n\n")[0])) for chunk in found if chunk.startswith(b"data: {")]
        assert told == [shown(event) for event in first.result()]


def test_what_fails_after_such_signs_is_an_event() -> None:
    slow = options("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=4", "option.predict_timeout=1")
    first = {**ASK, "max_tokens": 1000, "stream": True}
    with impatient(*slow) as server, http.stream("POST", server.url + CHAT, json=first) as answer:
        lines = answer.iter_lines()  # without a name it would be gone at once, and its connection with it
        assert next(lines)
        (event,) = events(server, CHAT, ASK)
        assert event["error"]["message"].startswith("the request waited 1 s for the engine")


# -- failures ----------------------------------------------------------------------------------------------------


@BOTH
def test_a_refusal_by_the_engine_has_its_status(paced: LiveServer, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "stream": True}
    asked |= {"prompt": "a <refuse>"} if "prompt" in body else {"messages": [{"role": "user", "content": "<refuse>"}]}
    assert "refused on cue" in error(paced.post(asked, path), 500)["message"]


def test_streams_do_not_cross(paced: LiveServer) -> None:
    def stream(name: str) -> set[str]:
        words = {"prompt": [f"p{name} q{name}", f"r{name}"], "max_tokens": 30, "n": 2}
        found = [event["choices"][0] for event in events(paced, COMPLETIONS, words)]
        texts = ["".join(choice["text"] for choice in found if choice["index"] == index) for index in range(4)]
        assert texts == [f" p{name} q{name}" * 15] * 2 + [f" r{name}" * 30] * 2
        said = events(paced, CHAT, {**ASK, "messages": [{"role": "user", "content": name}], "max_tokens": 33})
        assert "".join(map(shown, said)) == f" user: {name} assistant:" * 11
        return {event["id"] for event in said}

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(stream, "abcdefgh"))
    assert len(set.union(*ids)) == len(ids)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models"])
def test_other_methods_are_refused_in_openais_form(paced: LiveServer, path: str) -> None:
    found = http.request("DELETE", paced.url + path)
    assert error(found, 405)["type"] == "invalid_request_error"
    assert found.headers["allow"] == ("GET, HEAD" if path.endswith("models") else "POST")


@BOTH
@pytest.mark.parametrize(
    ("content", "headers", "status", "wanted"),
    [
        (b"{", {}, 400, "the body is not valid JSON"),
        (b"{}", {"content-type": "image/png"}, 415, "content type 'image/png' is not supported"),
        (b"{}", {"x-amzn-sagemaker-session-id": "s"}, 400, "stateful sessions not enabled"),
    ],
)
def test_bodies_that_cannot_be_read(
    paced: LiveServer, path: str, body: Any, content: bytes, headers: dict[str, str], status: int, wanted: str
) -> None:
    found = http.post(paced.url + path, content=content, headers=headers)
    assert wanted in error(found, status)["message"]


# -- the model and its adapters ----------------------------------------------------------------------------------


ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_models_are_listed(paced: LiveServer, tmp_path: Path) -> None:
    adapter = tmp_path / "one"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    registered = http.post(paced.url + "/adapters", json={"name": "one", "src": str(adapter)})
    assert registered.status_code == 200, registered.text
    listed = http.get(paced.url + "/v1/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["object"], model["parent"]) for model in listed["data"]] == [
        ("first", "model", None),
        ("org/x", "model", None),
        ("model", "model", None),
        ("one", "model", "model"),
    ]
    taken = ["text", *(kind for kind in MEDIA if not missing_packages(kind))]
    for model in listed["data"]:
        assert model["input_modalities"] == taken
        assert model["root"] == ("one" if model["id"] == "one" else "model")  # echo's comes from nowhere
        found = http.get(f"{paced.url}/v1/models/{model['id']}")
        assert (found.status_code, found.json()) == (200, model)
    assert error(http.get(paced.url + "/v1/models/two"), 404)["code"] == "model_not_found"
    _check_anthropics_list(paced, ["first", "org/x", "model", "one"])

    def told(name: str) -> str:
        return str(paced.post({**COMPLETE, "model": name}, COMPLETIONS).json()["choices"][0]["text"])

    assert [told(name) for name in ("model", "org/x", "tgi", "", "one")] == [" a b a"] * 4 + [" b a b"]
    assert error(paced.post({**COMPLETE, "model": "two"}, COMPLETIONS), 404)["param"] == "model"


def _check_anthropics_list(paced: LiveServer, ids: list[str]) -> None:
    """Ask for the same models as Anthropic's clients do."""

    def page(**query: Any) -> Any:
        return http.get(paced.url + "/v1/models", params=query, headers=ANTHROPIC).json()

    told = page()
    assert ([model["id"] for model in told.pop("data")], told) == (
        ids,
        {"has_more": False, "first_id": "first", "last_id": "one"},
    )
    for id in ids:
        found = http.get(f"{paced.url}/v1/models/{id}", headers=ANTHROPIC).json()
        assert found == page(after_id=ids[ids.index(id) - 1], limit=1)["data"][0] if id != ids[0] else page()["data"][0]
        assert (found["type"], found["id"], found["display_name"]) == ("model", id, id)
        assert datetime.strptime(found["created_at"], "%Y-%m-%dT%H:%M:%SZ").year >= 2026
    pages = (page(limit=2), page(limit=2, after_id="org/x"), page(limit=2, before_id="one"), page(after_id="one"))
    assert [([model["id"] for model in one["data"]], one["has_more"]) for one in pages] == [
        (["first", "org/x"], True),
        (["model", "one"], False),
        (["org/x", "model"], True),
        ([], False),
    ]
    for lifecycles, count in ((["active"], 4), (["retired", "active"], 4), (["retired", "deprecated"], 0)):
        for name in ("lifecycle", "lifecycle[]"):
            assert len(page(**{name: lifecycles})["data"]) == count
    for query, message in (
        ({"lifecycle[]": "old"}, 'lifecycle="old": must be one of active, deprecated, retired'),
        ({"limit": "0"}, 'limit="0": must be'),
        ({"after_id": "two"}, 'after_id="two": there is no'),
    ):
        assert page(**query)["error"]["message"].startswith(message)
    found = http.get(paced.url + "/v1/models/one", headers=ANTHROPIC)
    assert (found.status_code, found.json()["id"]) == (200, "one")
    missing = http.get(paced.url + "/v1/models/two", headers=ANTHROPIC)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


# -- tools -------------------------------------------------------------------------------------------------------

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
WORDS = ["Wait.", "<tool_call>[{", '"name":', '"weather",', '"arguments":', '{"city":', '"Köln"}}]</tool_call>', "Done"]


def test_calls_are_read_from_what_the_model_says(paced: LiveServer) -> None:
    """The echo engine says the prompt's last words: what the user wrote, and the mark of its own template."""
    body = {
        "messages": [{"role": "user", "content": " ".join(WORDS)}],
        "tools": TOOLS,
        "truncate_prompt_tokens": len(WORDS) + 1,
        "max_tokens": len(WORDS) - 1,
    }
    (choice,) = paced.post(body, CHAT).json()["choices"]
    assert choice["message"]["content"] == " Wait. "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert choice["finish_reason"] == "length"
    stopped = paced.post({**body, "max_tokens": 20, "stop": "Done"}, CHAT).json()["choices"][0]
    assert stopped["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in events(paced, CHAT, body)]
    assert "".join(delta.get("content") or "" for delta in deltas) == " Wait. "
    first, *rest = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    assert first["id"].startswith("call_")
    pieces = [first["function"]["arguments"], *(piece["function"]["arguments"] for piece in rest)]
    assert "".join(pieces) == '{"city": "Köln"}'
    assert len(pieces) > 1


# -- the demo model ----------------------------------------------------------------------------------------------


PARIS_IDS = [504, 3575, 282, 4649, 314]


@pytest.mark.model
def test_completions_know_the_capital_of_france(exact_server: LiveServer) -> None:
    body = {"prompt": [PARIS_IDS, "The capital of Italy is"], "temperature": 0, "max_tokens": 2}
    found = exact_server.post(body, COMPLETIONS).json()
    assert [choice["text"] for choice in found["choices"]] == [" Paris.", " Rome."]
    assert found["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
    scored = exact_server.post({**body, "prompt": PARIS_IDS, "echo": True, "logprobs": 1}, COMPLETIONS).json()
    (choice,) = scored["choices"]
    assert choice["text"] == "The capital of France is Paris."
    columns = choice["logprobs"]
    assert columns["tokens"] == ["The", " capital", " of", " France", " is", " Paris", "."]
    assert columns["text_offset"] == [0, 3, 11, 14, 21, 24, 30]
    first, *others = columns["token_logprobs"]
    assert first is None
    assert others == pytest.approx([-11.54, -0.34, -2.44, -0.45, -0.26, -0.38], abs=0.05)
    first, *tops, _ = columns["top_logprobs"]
    assert first is None
    assert [max(top, key=top.get) for top in tops] == ["-", " of", " the", " is", " Paris"]
    scored = exact_server.post(
        {"prompt": f"{choice['text'][:-1]}", "echo": True, "logprobs": 5, "max_tokens": 0}, COMPLETIONS
    ).json()
    assert scored["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    assert scored["choices"][0]["text"] == choice["text"][:-1]
    columns = scored["choices"][0]["logprobs"]
    assert columns["token_logprobs"][1:] == pytest.approx(others[:5], abs=0.001)
    assert [len(top) for top in columns["top_logprobs"][1:]] == [6, 5, 5, 5, 5]


@pytest.mark.model
def test_an_answer_ends_by_itself_without_a_limit(exact_server: LiveServer) -> None:
    ask = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    found = exact_server.post(ask, CHAT).json()
    assert found["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert found["choices"][0]["finish_reason"] == "stop"
    said = events(exact_server, CHAT, ask)
    assert "".join(map(shown, said)) == "The capital of France is Paris."
    assert said[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.model
def test_tools_are_in_the_prompt(exact_server: LiveServer) -> None:
    ask = {"messages": [{"role": "user", "content": "Weather?"}], "temperature": 0, "max_tokens": 1}

    def size(**more: Any) -> int:
        return int(exact_server.post({**ask, **more}, CHAT).json()["usage"]["prompt_tokens"])

    assert size(tools=TOOLS) > size() + 60
    assert size(tools=TOOLS, tool_choice="none") == size()


@pytest.mark.model
def test_a_prompt_too_long_for_the_tokenizer_is_named_as_the_route_does(exact_server: LiveServer) -> None:
    for path, field, body in (
        (COMPLETIONS, "prompt", {"prompt": "word " * 9000}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "word " * 9000}]}),
    ):
        refused = error(exact_server.post(body, path), 400)
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", field)
        assert "the model accepts at most 8191" in refused["message"]


def test_what_each_chunk_repeats_and_how_many_there_are_is_bounded(echo_server: LiveServer) -> None:
    long = error(echo_server.post({**COMPLETE, "model": "m" * 257}, COMPLETIONS), 400)
    many = error(echo_server.post({"prompt": ["a"] * 256, "n": 5}, COMPLETIONS), 400)
    assert (long["param"], many["param"]) == ("model", "n")


def test_the_server_may_count_every_chunk() -> None:
    """vLLM's option: gateways bill by the counts of clients that do not ask for them."""
    with serve("--engine", "echo", "-o", "option.enable_force_include_usage=true") as server:
        server.wait_ready()
        complete = {"prompt": "one two three", "max_tokens": 2}
        assert server.post(complete, COMPLETIONS).json()["usage"]["completion_tokens"] == 2
        asked = ((complete, COMPLETIONS), ({**ASK, "max_tokens": 2}, CHAT), ({**ASK, "max_tokens": 2}, "/invocations"))
        for body, path in asked:
            for options in (
                {},
                {"stream_options": {"include_usage": False}},
                {"stream_options": {"include_usage": True}},
            ):
                streamed = server.post({**body, "stream": True, **options}, path).text
                chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if "{" in line]
                assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-3:] == [1, 2, 2], path
                assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)


def test_what_ended_an_answer_is_told_as_in_vllm(echo_server: LiveServer) -> None:
    """`stop_reason`: the stop string or token, in whole answers and in a stream's last chunk of each choice."""
    prompt = {"prompt": "one two three four", "max_tokens": 9}
    chat = {"messages": [{"role": "user", "content": "one two three four"}], "max_tokens": 9}
    (plain,) = echo_server.post({**prompt, "return_token_ids": True}, COMPLETIONS).json()["choices"]
    third = plain["token_ids"][2]
    cases: list[tuple[dict[str, Any], str, str | int | None]] = [
        ({**prompt, "stop": ["e thr", "four"]}, COMPLETIONS, "four"),
        ({**prompt, "stop": ["two thr"]}, COMPLETIONS, "two thr"),
        ({**prompt, "stop": ["four"], "max_tokens": 4}, COMPLETIONS, "four"),
        ({**prompt, "stop": ["o thr"], "include_stop_str_in_output": True}, COMPLETIONS, "o thr"),
        ({**prompt, "stop": ["four"], "stop_token_ids": [third]}, COMPLETIONS, third),
        ({**prompt, "stop": ["five"], "max_tokens": 3}, COMPLETIONS, None),
        ({**chat, "stop": ["three"]}, CHAT, "three"),
        ({**chat, "stop": ["three"], "n": 2}, CHAT, "three"),
        (chat, CHAT, None),
    ]
    for body, path, wanted in cases:
        choices = echo_server.post(body, path).json()["choices"]
        assert [choice["stop_reason"] for choice in choices] == [wanted] * body.get("n", 1), body
        streamed = echo_server.post({**body, "stream": True}, path).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if "{" in line]
        parts = [part for chunk in chunks for part in chunk["choices"]]
        assert [part["stop_reason"] for part in parts if part["finish_reason"]] == [wanted] * body.get("n", 1), body
        assert not [part for part in parts if not part["finish_reason"] and "stop_reason" in part]


# -- chat completions through a live server: the wire with echo, real answers with the demo model ----------------------


CHAT_ASK = [{"role": "user", "content": "Name the capital of France."}]
GREEDY = {"temperature": 0, "max_tokens": 24}
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def laid_out(*messages: tuple[str, str]) -> str:
    """What the demo model's template makes of messages."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"


def text(found: Any) -> str:
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


def chat_chunks(body: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in body.splitlines()]


# -- echo --------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "function": {"name": "f"}}


def test_tools_are_there_as_on_openais_route(echo_server: LiveServer) -> None:
    """Echo repeats the last of the prompt: the call in the message that asks for one."""
    call = '<tool_call>[{"name":"f","arguments":{"a":1}}]</tool_call>'
    body = {"messages": [{"role": "user", "content": call}], "tools": [FUNCTION], "max_tokens": 400}
    found = [echo_server.post(body, path).json()["choices"][0] for path in ("/invocations", "/v1/chat/completions")]
    calls = [[item["function"] for item in choice["message"]["tool_calls"]] for choice in found]
    assert calls[0] == calls[1]
    assert {"name": "f", "arguments": '{"a":1}'} in calls[0]


def test_thoughts_are_shown_apart_and_no_stop_string_ends_them() -> None:
    words = {"messages": [{"role": "user", "content": "Hm STOP </think> Yes STOP no"}], "stop": "STOP"}
    with serve(
        *("--engine", "echo", "-o", "option.reasoning_parser=qwen3"),
        *("-o", 'option.default_chat_template_kwargs={"enable_thinking": true}'),
    ) as server:
        for path in ("/invocations", "/v1/chat/completions"):
            found = server.post(words, path).json()
            message = found["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (" user: Hm STOP ", " Yes ")
            assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        assert "the chat template does not read enable_thinking" in server.log
        off = server.post({**words, "chat_template_kwargs": {"enable_thinking": False}}, "/v1/chat/completions")
        assert off.headers["x-lmi-ignored-parameters"] == "chat_template_kwargs.enable_thinking"
        assert off.json()["choices"][0]["message"] == message | {"refusal": None}, "nobody told the model"


# -- the demo model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_it_knows_the_capital_of_france(model_server: LiveServer, exact_server: LiveServer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert text(exact_server.post({"messages": question, **GREEDY})) == "The capital of France is Paris."
    found = model_server.post({"messages": CHAT_ASK, **GREEDY})
    assert "Paris" in text(found)
    value = found.json()
    assert value["choices"][0]["finish_reason"] == "eos_token"
    usage = value["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 20  # the template's own system message is among them


@pytest.mark.model
@pytest.mark.parametrize(
    "messages",
    [
        [("user", "What is the capital of France?")],
        [("system", "You answer in one word."), ("user", "What is the capital of Italy?")],
        [("user", "My name is Ann."), ("assistant", "Hello Ann!"), ("user", "What is my name?")],
        [("user", "Übersetze 'Straße' — 你好 👋🏽")],
        [("user", "two\nlines\n\n  and spaces  "), ("assistant", ""), ("user", "{{ 7*7 }} {% raw %}")],
    ],
    ids=["question", "system", "turns", "unicode", "odd"],
)
def test_greedy_equals_the_text_laid_out_by_hand(model_server: LiveServer, messages: list[tuple[str, str]]) -> None:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **GREEDY}
    found = model_server.post(body)
    full = messages if messages[0][0] == "system" else [("system", DEFAULT_SYSTEM), *messages]
    by_hand = model_server.post(
        {"inputs": laid_out(*full), "parameters": {"max_new_tokens": GREEDY["max_tokens"], "details": True}}
    ).json()
    assert text(found) == by_hand["generated_text"]
    assert found.json()["usage"]["completion_tokens"] == by_hand["details"]["generated_tokens"]
    assert found.json()["choices"][0]["finish_reason"] == by_hand["details"]["finish_reason"]


@pytest.mark.model
def test_a_stream_says_the_same(model_server: LiveServer) -> None:
    whole = model_server.post({"messages": CHAT_ASK, **GREEDY, "logprobs": True, "top_logprobs": 1}).json()["choices"][
        0
    ]
    lines = chat_chunks(
        model_server.post({"messages": CHAT_ASK, **GREEDY, "logprobs": True, "top_logprobs": 1, "stream": True}).text
    )
    choices = [line["choices"][0] for line in lines]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["message"]["content"]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in whole["logprobs"]["content"]]
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@pytest.mark.model
def test_sampled_by_default_and_repeatable_by_seed(exact_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Write a line of a poem."}], "max_tokens": 16}
    asked = [text(exact_server.post({**body, "seed": seed})) for seed in (1, 2, 3, 1)]
    assert asked[3] == asked[0]
    assert len(set(asked)) > 1
    several = [exact_server.post({**body, "seed": 1, "n": 2}).json()["choices"] for _ in range(2)]
    assert several[0] == several[1]
    assert several[0][0]["message"] != several[0][1]["message"]


@pytest.mark.model
def test_a_stop_string_ends_it_and_is_not_shown(model_server: LiveServer) -> None:
    found = model_server.post({"messages": CHAT_ASK, **GREEDY, "stop": "France"})
    assert "France" not in text(found)
    assert found.json()["choices"][0]["finish_reason"] == "stop_sequence"


@pytest.mark.model
def test_many_at_once(model_server: LiveServer) -> None:
    """The template is laid out on several threads."""
    asks = [[{"role": "user", "content": f"Say the number {number}."}] for number in range(12)]

    def lengths(messages: Any) -> int:
        return int(model_server.post({"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"])

    alone = [lengths(messages) for messages in asks]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lengths, asks)) == alone


@pytest.mark.model
def test_too_long_a_chat_is_refused_by_its_name(model_server: LiveServer) -> None:
    for messages in (
        CHAT_ASK * 4_000,
        [{"role": "user", "content": ""}] * 20_000,
        [{"role": "user", "content": "a " * 400_000}],
    ):
        found = model_server.post({"messages": messages})
        assert found.status_code == 424
        assert "'messages' has" in found.json()["error"]


@pytest.mark.model
def test_tgi_compat_streams_lines(tgi_server: LiveServer) -> None:
    tgi_server.wait_ready()
    found = tgi_server.post({"messages": CHAT_ASK, **GREEDY, "stream": True})
    assert found.headers["content-type"] == "application/jsonlines"
    assert found.text.splitlines()[-1].startswith("{")
    whole = tgi_server.post({"messages": CHAT_ASK, **GREEDY})
    assert "Paris" in text(whole)
    refused = tgi_server.post({"messages": CHAT_ASK, "temperature": 9})
    assert (refused.status_code, refused.json()["error_type"]) == (424, "validation")

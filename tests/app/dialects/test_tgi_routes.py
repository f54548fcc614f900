"""TGI's own routes and MindIE's over real sockets: framing to the byte, keep-alives, statuses."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.app.server import impatient, serve
from tests.one_test import in_one_test
from tests.servers import PATIENCE, LiveServer, dechunked, events, http, options, post_bytes, raw, wait_for

GENERATED = "lmi_generated_tokens_total"
THREE = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


@pytest.fixture(scope="module", params=["tgi", "mindie"])
def paced(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Fifty tokens a second, with cues for failures."""
    pace = options("option.echo_tokens_per_second=50", "option.echo_cues=true", "option.engine_isolation=process")
    with serve("--engine", "echo", *pace, *options(f"option.root_schema={request.param}")) as server:
        server.wait_ready()
        yield server


def is_mindie(server: LiveServer) -> bool:
    return "index" not in events(server, "/", THREE)[0]


def words(found: list[dict[str, Any]]) -> list[str]:
    return [event["token"]["text"] for event in found if "token" in event]


# -- framing -----------------------------------------------------------------------------------------------------


def test_each_event_is_a_chunk(paced: LiveServer) -> None:
    mindie = is_mindie(paced)
    body = {**THREE, "parameters": {"max_new_tokens": 2, "details": True, "seed": 7}, "stream": True}
    head, _, rest = raw(paced, post_bytes(body, "/")).partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 200 ok"
    assert {b"content-type: text/event-stream", b"transfer-encoding: chunked", b"cache-control: no-cache"} <= {*lines}
    if mindie:
        first = b'{"token":{"id":4,"text":" a","logprob":null,"special":null},"generated_text":null,"details":null}'
        last = (
            b'{"token":{"id":5,"text":" b","logprob":null,"special":null},"generated_text":" a b",'
            b'"details":{"prompt_tokens":2,"finish_reason":"length","generated_tokens":2,"seed":7}}'
        )
    else:
        assert {b"x-compute-type: echo", b"x-compute-characters: 3", b"x-accel-buffering: no"} <= {*lines}
        first = (
            b'{"index":1,"token":{"id":4,"text":" a","logprob":0.0,"special":false},"generated_text":null,'
            b'"details":null}'
        )
        last = (
            b'{"index":2,"token":{"id":5,"text":" b","logprob":0.0,"special":false},"generated_text":"a b a b",'
            b'"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":2}}'
        )
    sent = [b"data: %s\n\n" % event for event in (first, last)]
    assert dechunked(rest) == b"".join(sent)


def test_a_silent_stream_says_that_it_is_there_in_tgi_routes() -> None:
    """Before the first token as between two: the second request waits for its place. MindIE's document has no such."""
    pace = options("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=2")
    with impatient(*pace, keep_alive=0.2) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(raw, server, post_bytes({**THREE, "stream": True}, "/"))
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        _, _, second = raw(server, post_bytes({**THREE, "stream": True}, "/generate_stream")).partition(b"\r\n\r\n")
    for body in (first.result().partition(b"\r\n\r\n")[2], second):
        pieces = body.split(b"\r\n")
        assert set(pieces[1::2]) - {b":\n\n", b"", b"0"} == {piece for piece in pieces if piece.startswith(b"data")}
        assert pieces.count(b":\n\n") >= 2
        assert pieces.count(b"3") == pieces.count(b":\n\n")
        assert body.endswith(b"0\r\n\r\n")
    assert second.startswith(b"3\r\n:\n\n\r\n")  # before its first token
    with impatient(*options("option.echo_tokens_per_second=2", "option.root_schema=mindie"), keep_alive=0.2) as server:
        assert b":\n\n" not in raw(server, post_bytes({**THREE, "stream": True}, "/")).partition(b"\r\n\r\n")[2]


def test_a_stream_that_has_only_said_that_it_is_there_ends_with_an_event() -> None:
    pace = options("option.max_rolling_batch_size=1", "option.echo_tokens_per_second=2")
    with impatient(*pace, keep_alive=0.2) as server, ThreadPoolExecutor(2) as pool:
        long = {"inputs": "a", "parameters": {"max_new_tokens": 1000}}
        pool.submit(server.post, long, "/")
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            connection.sendall(post_bytes(long, "/generate_stream", "Connection: close\r\n"))
            found = b""
            while b":\n\n" not in found:
                found += connection.recv(65536)
            for _ in range(2):  # the second ends what is under way
                server.send_signal(signal.SIGTERM)
            while data := connection.recv(65536):
                found += data
        body = found.partition(b"\r\n\r\n")[2]
    event = b'data: {"error":"Incomplete generation","error_type":"incomplete_generation"}\n\n'
    assert body.startswith(b"3\r\n:\n\n\r\n")
    assert body.endswith(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))


def test_a_refused_stream_is_one_event_under_200(echo_server: LiveServer) -> None:
    for path, body in (("/", {"stream": True}), ("/generate_stream", {})):
        found = echo_server.post({"inputs": "", **body}, path)
        assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream")
        message = "Input validation error: `inputs` cannot be empty"
        assert found.text == f'data: {{"error":"{message}","error_type":"validation"}}\n\n'


# -- statuses ----------------------------------------------------------------------------------------------------


@in_one_test(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b'{"inputs":"a"} x', {}, 400),
        (b'{"inputs":"a","inputs":"b"}', {}, 400),
        (b"[]", {}, 422),
        (b'{"inputs":"a","stream":true,"parameters":{"stop":null}}', {}, 422),
        (b"a prompt", {"content-type": "text/plain"}, 415),
        (b'{"inputs":"a"}', {"content-type": "text/csv"}, 415),
        (b'{"inputs":"a"}', {"content-encoding": "br"}, 415),
    ],
)
@in_one_test("path", ["/", "/generate", "/generate_stream", "/tokenize"])
def test_what_is_no_request_has_its_status_on_streams_too(
    echo_server: LiveServer, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    headers = {"content-type": "application/json", **headers}
    found = http.post(echo_server.url + path, content=content, headers=headers)
    assert (found.status_code, found.headers["content-type"]) == (status, "application/json")
    assert found.json().keys() == {"error", "error_type"}
    assert found.json()["error_type"] == "validation"


@pytest.mark.parametrize("path", ["/", "/generate"])
def test_a_bad_value_is_422(echo_server: LiveServer, path: str) -> None:
    found = echo_server.post({**THREE, "parameters": {"top_p": 1.0}}, path)
    message = "Input validation error: `top_p` must be > 0.0 and < 1.0"
    assert (found.status_code, found.json()) == (422, {"error": message, "error_type": "validation"})


def test_a_wrong_method_is_405(echo_server: LiveServer) -> None:
    for path in ("/generate", "/generate_stream", "/tokenize", "/chat_tokenize"):
        found = http.get(echo_server.url + path)
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
        assert found.json()["error_type"] == "validation"


def test_a_body_over_the_limit_is_413() -> None:
    with serve("--engine", "echo", *options("max_request_size=100")) as server:
        found = server.post({"inputs": "a" * 200}, "/generate_stream")
        assert (found.status_code, found.json()["error_type"]) == (413, "validation")


def test_what_is_too_long_is_refused_with_tgis_figures() -> None:
    with serve("--engine", "echo", *options("option.max_model_len=10")) as server:
        server.wait_ready()

        def error(inputs: str, **parameters: Any) -> str:
            found = server.post({"inputs": inputs, "parameters": parameters}, "/generate")
            assert (found.status_code, found.json()["error_type"]) == (422, "validation")
            return str(found.json()["error"]).removeprefix("Input validation error: ")

        both = "`inputs` tokens + `max_new_tokens` must be <= 10. Given:"
        assert error("a a a", max_new_tokens=8) == f"{both} 3 `inputs` tokens and 8 `max_new_tokens`"
        assert error("a " * 12) == f"{both} 12 `inputs` tokens and 0 `max_new_tokens`"
        assert error("a " * 10) == "`inputs` must have less than 9 tokens. Given: 10"
        assert error("a", truncate=10) == "`truncate` must be strictly positive and less than 9. Given: 10"
        cut = server.post({"inputs": "a " * 12, "parameters": {"truncate": 3}}, "/generate").json()
        assert cut == {"generated_text": " a" * 7}  # what the context leaves


def test_more_than_the_context_leaves_is_cut_where_tgi_cuts_it() -> None:
    """TGI 3 checks the first 1024 new tokens; LMI's routes refuse what cannot fit."""
    with serve("--engine", "echo", *options("option.max_model_len=1100")) as server:
        server.wait_ready()
        asked = {"inputs": "a b", "parameters": {"max_new_tokens": 5000, "details": True}}
        details = server.post(asked, "/generate").json()["details"]
        assert (details["generated_tokens"], details["finish_reason"]) == (1098, "length")
        long = {"inputs": "a " * 100, "parameters": {"max_new_tokens": 5000}}
        assert "100 `inputs` tokens and 1024 `max_new_tokens`" in server.post(long, "/generate").json()["error"]
        assert server.post(asked).status_code == 424


def test_figures_are_in_headers(paced: LiveServer) -> None:
    if is_mindie(paced):
        assert "x-compute-time" not in paced.post(THREE, "/").headers
        return
    found = paced.post({"inputs": "a b é", "parameters": {"max_new_tokens": 10}}, "/").headers
    assert (found["x-compute-type"], found["x-compute-characters"]) == ("echo", "5")
    assert (found["x-prompt-tokens"], found["x-generated-tokens"]) == ("3", "10")
    assert 0.15 < float(found["x-compute-time"]) < 60, "seconds"
    assert abs(int(found["x-total-time"]) - float(found["x-compute-time"]) * 1000) < 1.001, (
        "cut, where the other is rounded"
    )
    assert 150 <= int(found["x-inference-time"]) <= int(found["x-total-time"])
    assert int(found["x-time-per-token"]) == int(found["x-inference-time"]) // 10
    assert int(found["x-validation-time"]) + int(found["x-queue-time"]) < int(found["x-total-time"])


# -- in flight ---------------------------------------------------------------------------------------------------


def test_an_answer_that_a_stop_cuts_off_is_incomplete() -> None:
    incomplete = {"error": "Incomplete generation", "error_type": "incomplete_generation"}
    with serve("--engine", "echo", *options("option.echo_tokens_per_second=20")) as server:
        server.wait_ready()
        long = {"inputs": "a b", "parameters": {"max_new_tokens": 1000}}
        with ThreadPoolExecutor(2) as pool:
            stream, whole = pool.submit(events, server, "/", long), pool.submit(server.post, long, "/")
            wait_for(lambda: server.metric("lmi_active_sequences") == 2, 5, "they do not run")
            wait_for(lambda: server.metric(GENERATED) > 8, 5, "nothing comes")
            server.send_signal(signal.SIGTERM)  # lets them end
            wait_for(lambda: server.ping() == 503, 5, "it does not hear the signal")
            server.send_signal(signal.SIGTERM)  # does not
            *tokens, last = stream.result()
            assert tokens
            assert last == incomplete
            assert (whole.result().status_code, whole.result().json()) == (500, incomplete)


# -- routes ------------------------------------------------------------------------------------------------------


def test_mindies_root_and_tgis_other_routes() -> None:
    with serve("--engine", "echo", *options("option.root_schema=mindie")) as server:
        server.wait_ready()
        details = {"inputs": "a b", "parameters": {"max_new_tokens": 1, "details": True, "seed": 3}}
        assert server.post(details, "/").json()["details"] == {
            "finish_reason": "length", "generated_tokens": 1, "prefill": [], "prompt_tokens": 2, "seed": 3,
            "tokens": [{"id": 4, "logprob": None, "special": None, "text": " a"}],
        }  # fmt: skip
        assert len(server.post({"inputs": "a"}, "/").json()["generated_text"].split()) == 20
        assert server.post({"inputs": "a", "parameters": {"seed": 0}}, "/").json() == {
            "error": "Input validation error: `seed` must be strictly positive"
        }
        assert server.post(details, "/generate").json()["details"]["tokens"][0]["special"] is False


def test_info_and_health(echo_server: LiveServer) -> None:
    found = http.get(echo_server.url + "/info").json()
    assert list(found) == [
        "model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of", "max_stop_sequences",
        "max_input_tokens", "max_total_tokens", "validation_workers", "max_client_batch_size", "router", "version",
        "sha", "docker_label", "default_sampling_params",
    ]  # fmt: skip
    assert (found["max_total_tokens"], found["max_input_tokens"]) == (1 << 17, (1 << 17) - 1)
    assert (found["max_concurrent_requests"], found["max_best_of"], found["max_stop_sequences"]) == (1032, 2, 4)
    prompts = ["a"] * found["max_client_batch_size"]
    for more, status in (([], 200), (["a"], 400)):
        body = {"prompt": [*prompts, *more], "max_tokens": 1}
        assert echo_server.post(body, "/v1/completions").status_code == status
    health = http.get(echo_server.url + "/health")
    assert (health.status_code, health.content) == (200, b"")


def test_health_while_the_engine_hangs() -> None:
    hang = options("option.echo_cues=true", "option.engine_timeout=0.5", "option.engine_isolation=process")
    with serve("--engine", "echo", *hang) as server:
        server.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(server.post, {"inputs": "<hang>", "parameters": {"max_new_tokens": 1}}, "/generate")
            unhealthy = []

            def seen() -> bool:
                found = http.get(server.url + "/health")
                if found.status_code == 503:
                    unhealthy.append(found.json())
                return bool(unhealthy)

            wait_for(seen, 10, "it never was unhealthy")
        assert unhealthy[0] == {"error": "unhealthy", "error_type": "healthcheck"}
        assert failed.result().json()["error_type"] == "generation"


def test_tokenize(echo_server: LiveServer) -> None:
    body = {"inputs": "a  é a", "parameters": {"truncate": 1, "max_new_tokens": 0}, "stream": True}
    assert echo_server.post(body, "/tokenize").json() == [
        {"id": 4, "text": "a", "start": 0, "stop": 1},
        {"id": 5, "text": "é", "start": 3, "stop": 5},
        {"id": 4, "text": " a", "start": 5, "stop": 7},
    ]
    found = echo_server.post({"inputs": ""}, "/tokenize")
    assert (found.status_code, found.json()["error_type"]) == (422, "validation")
    assert echo_server.post({"inputs": 1}, "/tokenize").status_code == 422


def test_tgi_chats_continue_a_last_message_of_the_assistant(echo_server: LiveServer) -> None:
    chat: dict[str, Any] = {
        "model": "tgi",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So it "}],
    }

    def tokens(more: dict[str, Any]) -> int:
        answer = echo_server.post({**chat, **more}, "/v1/chat/completions")
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    continued, answered = 5, 6  # user: hi / assistant: So it [/ assistant:]
    assert tokens({}) == tokens({"continue_final_message": True}) == continued
    assert tokens({"model": ""}) == tokens({"add_generation_prompt": True}) == answered
    assert tokens({"continue_final_message": False}) == answered
    parts = [chat["messages"][0], {"role": "assistant", "content": [{"type": "text", "text": "So it"}]}]
    assert tokens({"messages": parts}) == continued
    for content in ("", " "):
        assert tokens({"messages": [chat["messages"][0], {"role": "assistant", "content": content}]}) == 4
    chunks = events(echo_server, "/v1/chat/completions", chat, end=["data: [DONE]"])
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == " user: hi assistant:"
    rendered = echo_server.post(chat, "/chat_tokenize").json()
    assert rendered["templated_text"] == "user: hi\nassistant: So it"
    assert len(rendered["tokenize_response"]) == continued
    assert echo_server.post(chat, "/invocations").json()["usage"]["prompt_tokens"] == answered, "LMI has no such rule"


def test_chat_tokenize(echo_server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "tgi", "temperature": 0.5, "other": 1}
    found = echo_server.post(chat, "/chat_tokenize")
    assert found.json()["templated_text"] == "user: hi\nassistant:"
    assert [token["text"] for token in found.json()["tokenize_response"]] == ["user:", " hi", "assistant:"]
    assert found.headers["x-lmi-ignored-parameters"] == "other"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat["messages"] = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    laid_out = echo_server.post({**chat, "max_completion_tokens": 1, "echo": False, "other": None}, "/chat_tokenize")
    assert "x-lmi-ignored-parameters" not in laid_out.headers
    answer = echo_server.post({**chat, "max_tokens": 1}, "/v1/chat/completions").json()
    assert len(laid_out.json()["tokenize_response"]) == answer["usage"]["prompt_tokens"]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with_tools: list[dict[str, Any]] = [{"tools": [tool]}, {"tools": [tool], "tool_choice": "none"}, {"tools": []}]
    for more in with_tools:
        found = echo_server.post({**chat, **more}, "/chat_tokenize").json()
        answer = echo_server.post({**chat, **more, "max_tokens": 1}, "/v1/chat/completions").json()
        assert len(found["tokenize_response"]) == answer["usage"]["prompt_tokens"]
        assert ("look" in found["templated_text"]) == (more == {"tools": [tool]})
    refusals: list[Any] = [{}, {"messages": []}, {**chat, "tools": [{}]}, {**chat, "continue_final_message": True}, []]
    for wrong in refusals:
        refused = echo_server.post(wrong, "/chat_tokenize")
        assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")


# -- the demo model ----------------------------------------------------------------------------------------------

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.model
def test_special_tokens_show_in_tokens_and_not_in_the_text(model_server: LiveServer) -> None:
    model_server.wait_ready()
    body = {"inputs": CHAT, "parameters": {"max_new_tokens": 200, "details": True}}
    found = model_server.post(body, "/generate").json()
    *tokens, end = found["details"]["tokens"]
    assert (end["text"], end["special"], found["details"]["finish_reason"]) == ("<|im_end|>", True, "eos_token")
    assert found["generated_text"] == "".join(token["text"] for token in tokens)
    assert "Paris" in found["generated_text"]
    stream = events(model_server, "/generate_stream", body)
    assert words(stream) == [token["text"] for token in found["details"]["tokens"]]
    assert stream[-1]["generated_text"] == found["generated_text"]
    assert model_server.post(body, "/").json()[0]["generated_text"] == CHAT + found["generated_text"]


@pytest.mark.model
def test_a_special_tokens_text_can_stop_an_answer(model_server: LiveServer) -> None:
    """As users of TGI end a turn by hand; the mark is not in the text, as the whole text has none."""
    model_server.wait_ready()
    parameters = {"max_new_tokens": 200, "details": True, "stop": ["<|im_end|>"]}
    found = model_server.post({"inputs": CHAT, "parameters": parameters}, "/generate").json()
    assert "<|im_end|>" not in found["generated_text"]
    assert found["details"]["tokens"][-1]["text"] == "<|im_end|>"


@pytest.mark.model
def test_the_models_tokens_stand_where_tokenizers_has_them(model_server: LiveServer) -> None:
    """Ids and offsets as the Rust library gives them for this model's tokenizer.json, in bytes."""
    found = model_server.post({"inputs": "Hello world é 👩\u200d🚀"}, "/tokenize").json()
    assert [token["id"] for token in found] == [19556, 905, 26411, 15107, 235, 119, 321, 231, 10813, 244, 218]
    assert [(token["start"], token["stop"]) for token in found] == [
        (0, 5), (5, 11), (11, 14), (14, 19), (15, 19), (15, 19), (19, 22), (19, 22), (22, 26), (22, 26), (22, 26),
    ]  # fmt: skip
    assert [token["text"] for token in found[:4]] == ["Hello", " world", " é", " 👩"]
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]}
    laid_out = model_server.post(chat, "/chat_tokenize").json()
    assert laid_out["templated_text"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert laid_out["tokenize_response"][0] == {"id": 1, "text": "<|im_start|>", "start": 0, "stop": 12}


@pytest.mark.model
def test_mindies_document_by_example(mindie_server: LiveServer) -> None:
    parameters = {
        "decoder_input_details": True, "details": True, "do_sample": True, "max_new_tokens": 20,
        "repetition_penalty": 1.03, "return_full_text": False, "seed": None, "temperature": 0.5, "top_k": 10,
        "top_p": 0.95, "truncate": None, "typical_p": 0.5, "watermark": False,
    }  # fmt: skip
    body = {"inputs": "My name is Olivier and I", "parameters": parameters, "stream": False}
    answer = mindie_server.post(body, "/")
    assert answer.headers["x-lmi-ignored-parameters"] == "parameters.typical_p"
    found = answer.json()
    details = found["details"]
    assert "".join(token["text"] for token in details["prefill"]) == body["inputs"]
    assert (details["prompt_tokens"], details["generated_tokens"]) == (8, len(details["tokens"]))
    again = {**body, "parameters": {**parameters, "seed": details["seed"], "decoder_input_details": False}}
    stream = events(mindie_server, "/", again)
    assert stream[-1]["generated_text"] == found["generated_text"]
    assert stream[-1]["details"] == {
        "prompt_tokens": 8, "finish_reason": details["finish_reason"],
        "generated_tokens": details["generated_tokens"], "seed": details["seed"],
    }  # fmt: skip

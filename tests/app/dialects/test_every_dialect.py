"""Every dialect at its own route, at once on one server: modes, neighbours, a full queue, a killed engine, clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.app.server import AppServer, serve
from tests.app.test_http import CANCELLED
from tests.doubles import tiny
from tests.one_test import in_one_test
from tests.parameter_matrix import TGI_VALUES, check, check_chat, check_tgi
from tests.process.engines.openai.server import HEAD, Server, event, listening, status
from tests.servers import LiveServer, http, options, post_bytes, wait_for
from tests.unit.protocols.assistant.response_templates import TEMPLATES

VARYING = re.compile(r'"(?:id|created)":[^,]+')
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


class Dialect(NamedTuple):
    """A request at `path`.

    Attributes:
        body: takes a prompt and the answer's length in tokens.
        before: what the echo engine says before the prompt's words.
        failed: words of a stream's last line when the engine was lost.
        full: the status where the queue is full, and words of that answer.
    """

    path: str
    body: Callable[[str, int], dict[str, Any]]
    before: str
    failed: str
    full: tuple[int, str]


def lmi(text: str, tokens: int) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens, "return_full_text": False}}


def chat(text: str, tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}


def completion(text: str, tokens: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": tokens}


def triton(text: str, tokens: int) -> dict[str, Any]:
    return {"text_input": text, "max_tokens": tokens, "exclude_input_in_output": True}


def infer(text: str, tokens: int) -> dict[str, Any]:
    values = {"text_input": ("BYTES", text), "max_tokens": ("INT32", tokens), "exclude_input_in_output": ("BOOL", True)}
    return {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
            for name, (datatype, value) in values.items()
        ]
    }


LMI = ('"error":"engine failure: ', (503, '"type":"WlmCapacityException"'))
OPENAI = ('"type":"server_error"', (429, '"code":"rate_limit_exceeded"'))
OVERLOADED = '{"error":"Model is overloaded","error_type":"overloaded"}'
TGI = '"error_type":"generation"}'
TRITON = ('{"error":"engine failure: ', (503, "job_queue_size"))
DIALECTS = {
    "lmi": Dialect("/invocations", lmi, "", *LMI),
    "lmi chat": Dialect("/predictions/model", chat, " user:", *LMI),
    "openai chat": Dialect("/v1/chat/completions", chat, " user:", *OPENAI),
    "openai completions": Dialect("/v1/completions", completion, "", *OPENAI),
    "anthropic": Dialect("/v1/messages", chat, " user:", '"error":{"type":"api_error"', (529, '"overloaded_error"')),
    "tgi": Dialect("/", lmi, "", TGI, (429, OVERLOADED)),
    "tgi generate": Dialect("/generate", lmi, "", TGI, (429, OVERLOADED)),
    "tgi stream": Dialect("/generate_stream", lmi, "", TGI, (200, f"data: {OVERLOADED}\n\n")),
    "triton": Dialect("/v2/models/model/generate", triton, "", *TRITON),
    "triton infer": Dialect("/v2/models/model/infer", infer, "", *TRITON),
    "triton stream": Dialect("/v2/models/model/generate_stream", triton, "", *TRITON),
}
STREAMS = {name: one for name, one in DIALECTS.items() if name not in ("tgi generate", "triton", "triton infer")}


@pytest.fixture(scope="module")
def paced() -> Iterator[AppServer]:
    pace = options("option.echo_tokens_per_second=50", "option.engine_isolation=process")
    with serve("--engine", "echo", *pace, *options("option.max_rolling_batch_size=128")) as server:
        server.wait_ready()
        yield server


def lines(found: httpx.Response) -> Iterator[str]:
    skipped = ("", ":", "data: [DONE]")
    return (line.removeprefix("data: ") for line in found.iter_lines() if line not in skipped and line[:6] != "event:")


def said(value: Any) -> str:
    """The text of a line, or of a whole answer."""
    match value:
        case [one]:
            return said(one)
        case {"outputs": [{"data": [text]}]}:
            return str(text)
        case {"choices": [{"text": text}]} | {"choices": [{"delta": {"content": text}}]}:
            return str(text)
        case {"choices": [{"message": {"content": text}}]} | {"token": {"text": text}} | {"outputs": [text]}:
            return str(text)
        case (
            {"text_output": text} | {"generated_text": text} | {"content": [{"text": text}]} | {"delta": {"text": text}}
        ):
            return str(text)
    return ""


def answered(server: LiveServer, dialect: Dialect, text: str, tokens: int, *, stream: bool) -> str:
    body = {**dialect.body(text, tokens), **({"stream": True} if stream else {})}
    with http.stream("POST", server.url + dialect.path, json=body, timeout=60) as found:
        assert found.status_code == 200, found.read()
        return "".join(said(json.loads(line)) for line in lines(found))


@pytest.mark.parametrize("mode", ["option.tgi_compat=true", "option.rolling_batch=disable"])
def test_all_are_there_in_every_mode(mode: str) -> None:
    with serve("--engine", "echo", *options(mode)) as server:
        for name, dialect in DIALECTS.items():
            wanted = f"{dialect.before} a b"
            assert answered(server, dialect, "a b", len(wanted.split()), stream=False) == wanted
            if name in STREAMS and (name, mode) != ("lmi", "option.rolling_batch=disable"):
                assert answered(server, dialect, "a b", len(wanted.split()), stream=True) == wanted


@pytest.mark.parametrize("mode", ["option.rolling_batch=auto", "option.rolling_batch=disable"])
def test_openai_compat_answers_chats_on_invocations_as_on_openais_route(mode: str) -> None:
    chat, prompt = DIALECTS["openai chat"], DIALECTS["lmi"]
    with serve("--engine", "echo", *options(mode), *options("option.openai_compat=true")) as server:
        for stream in (False, True):
            body = {**chat.body("a b", 4), "stream": stream}
            direct, invoked = server.post(body, chat.path), server.post(body)
            assert VARYING.sub("", invoked.text) == VARYING.sub("", direct.text)
            assert invoked.headers["content-type"] == direct.headers["content-type"]
        assert server.post({"messages": []}).json() == server.post({"messages": []}, chat.path).json()
        assert server.post(prompt.body("a b", 2)).json() in ({"generated_text": " a b"}, [{"generated_text": " a b"}])


def test_openai_compat_takes_any_name_of_a_model_on_invocations_alone() -> None:
    chat = DIALECTS["openai chat"]
    body = {**chat.body("a b", 4), "model": "nobody"}
    with serve("--engine", "echo", "-o", "option.openai_compat=true") as server:
        taken = server.post(body)
        assert taken.status_code == 200
        assert taken.headers["x-lmi-ignored-parameters"] == "model"
        assert server.post(body, chat.path).status_code == 404
        assert server.post({**body, "model": 1}).status_code == 400
        wrongs: tuple[Any, ...] = ({"text": "a"}, [], 1)
        for wrong in wrongs:
            refused = server.post(wrong)
            assert (refused.status_code, set(refused.json()["error"])) == (400, {"message", "type", "param", "code"})


def test_sagemakers_header_names_the_route(paced: LiveServer) -> None:
    for dialect in DIALECTS.values():
        wanted = f"{dialect.before} a b"
        body = dialect.body("a b", len(wanted.split()))
        direct = paced.post(body, dialect.path)
        routed = paced.post(body, headers={ATTRIBUTES: f"k=v, route={dialect.path}; x=y"})
        assert VARYING.sub("", routed.text) == VARYING.sub("", direct.text)
        assert "".join(said(json.loads(line)) for line in lines(routed)) == wanted


def test_neighbours_get_their_own_tokens(paced: LiveServer) -> None:
    """A hundred clients begin at the same time, and their answers have different lengths."""
    started = threading.Barrier(100)

    def one(number: int) -> bool:
        dialect = list(DIALECTS.values())[number % len(DIALECTS)]
        stream, tokens = dialect in STREAMS.values(), 10 + number % 7
        words = (f"{dialect.before} w{number}{' assistant:' if dialect.before else ''}".split() * tokens)[:tokens]
        started.wait(30)
        return answered(paced, dialect, f"w{number}", tokens, stream=stream) == "".join(f" {word}" for word in words)

    with ThreadPoolExecutor(100) as pool:
        assert all(pool.map(one, range(100)))


@pytest.mark.parametrize("name", [*DIALECTS, "two prompts"])
def test_a_client_that_leaves_ends_its_request_in_every_dialect(paced: LiveServer, name: str) -> None:
    dialect, before = DIALECTS.get(name, DIALECTS["openai completions"]), paced.metric(CANCELLED)
    body = dialect.body("a", 100_000)
    if name == "two prompts":
        body["prompt"] = ["a", "b"]
    if dialect in STREAMS.values():
        with http.stream("POST", paced.url + dialect.path, json={**body, "stream": True}) as found:
            next(lines(found))
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post(paced.url + dialect.path, json=body, timeout=0.3)
    wait_for(lambda: paced.metric(CANCELLED) == before + 1, 5, "it was not cancelled")
    wait_for(lambda: paced.metric("lmi_active_sequences") == 0, 5, "the engine still works on it")


def test_a_killed_engine_ends_each_stream_with_an_error_of_its_own(paced: AppServer) -> None:
    with contextlib.ExitStack() as stack:
        asked = []
        for dialect in STREAMS.values():
            body = {**dialect.body("a", 5000), "stream": True}
            found = stack.enter_context(http.stream("POST", paced.url + dialect.path, json=body, timeout=60))
            asked.append((dialect, lines(found)))
            assert any(said(json.loads(line)) in (" a", " user:") for line in asked[-1][1])
        os.kill(paced.engine_pid(), signal.SIGKILL)
        for dialect, found_lines in asked:
            *tokens, last = found_lines
            assert {said(json.loads(line)) for line in tokens} <= {"", " a", " user:", " assistant:"}
            assert dialect.failed in last
            assert "killed by signal 9" in last
    paced.wait_ready(20)
    assert paced.post(lmi("a", 1)).json() == {"generated_text": " a"}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with listening(owner="lmi-handler") as server:
        server.models["data"][0]["max_model_len"] = tiny.CONTEXT
        yield server


@pytest.fixture(scope="module")
def in_front(upstream: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    model = tiny.make(tmp_path_factory.mktemp("tiny"))
    own = options(f"option.base_url={upstream.url}", "option.chat_template={{ messages[0]['content'] }}")
    with serve(str(model), "--engine", "openai", *own, *options("option.engine_isolation=thread")) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_busy_servers_of_the_engine_are_told_as_a_full_queue_is(
    upstream: Server, in_front: AppServer, name: str, stream: bool
) -> None:
    dialect = DIALECTS[name]
    if stream and dialect not in STREAMS.values():
        return
    body = {**dialect.body("a", 1), **({"stream": True} if stream else {})}
    overloaded = in_front.metric('lmi_requests_total{outcome="overloaded"}')
    for code, headers, wait in ((503, "Retry-After: 7\r\n", "7"), (429, "Retry-After: 9999\r\n", "60"), (429, "", "")):
        upstream.always = (status(code, "http://10.1.2.3/v1 has no room", f"{headers}Connection: close\r\n"),)
        found = in_front.post(body, dialect.path)
        assert found.status_code == (200 if stream and name == "tgi" else dialect.full[0]), found.text
        assert dialect.full[1].replace("job_queue_size", f"the lmi server is busy: it answered {code}") in found.text
        assert "10.1.2.3" not in found.text
        if found.status_code == 200:  # TGI tells a stream's error in an event
            continue
        waits = found.headers["retry-after"], found.headers["retry-after-ms"]
        assert waits == (wait, f"{wait}000") if wait else waits[0] in "1234", "as it says, else at random"
    assert in_front.metric('lmi_requests_total{outcome="overloaded"}') == overloaded + 3
    upstream.always = (HEAD + event(300) + b'data: {"error": {"message": "no room", "code": 503}}\n\n',)
    found = in_front.post({**body, **dialect.body("a", 4)}, dialect.path)
    assert "is busy" not in found.text, "after a token it is an error of the engine"
    assert "answered 503" in found.text
    assert found.status_code not in (429, 503, 529)
    assert "retry-after" not in found.headers


def test_a_full_queue_is_told_in_the_dialects_words() -> None:
    room = options("option.max_rolling_batch_size=1", "job_queue_size=1", "option.echo_tokens_per_second=20")
    waits: list[int] = []
    with serve("--engine", "echo", *room) as server:
        with contextlib.ExitStack() as held:
            for _ in range(2):
                connection = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                connection.sendall(post_bytes(lmi("a", 100_000)))
            wait_for(lambda: server.metric("lmi_queued_requests") == 1, 5, "nobody waits")
            for dialect in DIALECTS.values():
                found = server.post(dialect.body("a", 1), dialect.path)
                assert found.status_code == dialect.full[0]
                assert dialect.full[1] in found.text
                if found.status_code == 200:  # TGI tells a stream's error in an event
                    continue
                milliseconds = int(found.headers["retry-after-ms"])
                waits.append(milliseconds)
                assert found.headers["retry-after"] == str(-(-milliseconds // 1000))
            assert all(1000 <= wait <= 4000 for wait in waits)
            assert len(set(waits)) > 1, "all would come again together"
        wait_for(lambda: server.metric("lmi_active_sequences") == 0, 5, "they are not cancelled")
        answered = server.post(lmi("a", 1))
        assert answered.status_code == 200
        assert not {"retry-after", "retry-after-ms"} & {*answered.headers}


# -- parameters over HTTP, in each dialect: one that the engine has, one that it lacks, one that is ignored ------------
# All of them, for all engines, are in tests/unit/protocols/test_parameters.py.


UNMET = {"adapter_id", "lora_task_id"}
"""What the echo server would serve, if it were started with option.enable_lora=true."""


@in_one_test("name", ["seed", "guided_json", "adapter_id", "input_ids", "random_seed", "lora_task_id"])
def test_echo(echo_server: LiveServer, name: str) -> None:
    check(echo_server, "echo", name, unmet=UNMET)


@pytest.mark.parametrize("name", ["top_p", "top_logprobs", "user"])
def test_chat_on_echo(echo_server: LiveServer, name: str) -> None:
    check_chat(echo_server, "echo", name)


@pytest.mark.parametrize("name", ["top_p", "grammar", "watermark"])
def test_tgi_on_echo(echo_server: LiveServer, name: str) -> None:
    check_tgi(echo_server, "echo", name, unmet=UNMET & TGI_VALUES.keys())


# -- which parsers read a served model's answers without an option, and what the start says of them --------------------


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>Hm.</think> Yes. {CALL}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
THINKS = "{{ messages[-1].content }}{% if tools %}{# <tool_call> <think></think> #}{% endif %}"


@pytest.mark.parametrize(
    ("own", "option", "said", "message"),
    [
        ({}, (), "reasoning: qwen3, according to the chat template", ("Hm.", " Yes. ", 1)),
        ({}, ("option.reasoning_parser=none",), "option.reasoning_parser=none", (None, "<think>Hm.</think> Yes. ", 1)),
        ({"response_template": TEMPLATES["hermes"]}, (), "reasoning: hf, according to the mo", ("Hm.", "Yes.", 1)),
        ({"response_template": {"fields": {}}}, (), "tokenizer_config.json: response_template.fields: must have",
         ("Hm.", " Yes. ", 1)),
    ],
)  # fmt: skip
def test_a_model_gets_its_parsers_without_an_option(
    tmp_path: Path, own: Any, option: tuple[str, ...], said: str, message: tuple[str | None, str, int]
) -> None:
    directory = tiny.make(tmp_path / "tiny")
    file = directory / "tokenizer_config.json"
    given = {**json.loads(file.read_text()), "chat_template": THINKS, **own}
    file.write_text(json.dumps(given))
    for other in directory.glob("chat_template.*"):
        other.unlink()
    # echo repeats the prompt, which is the message
    body = {"messages": [{"role": "user", "content": ANSWER}], "tools": TOOLS}
    with serve("--engine", "echo", *options(f"option.echo_tokenizer={directory}", *option)) as server:
        server.wait_ready()
        limit = http.post(server.url + "/tokenize", json=body).json()["count"]
        for path in ("/v1/chat/completions", "/invocations"):
            shown = server.post({**body, "max_tokens": limit}, path).json()["choices"][0]["message"]
            assert (shown.get("reasoning"), shown["content"], len(shown["tool_calls"])) == message
        raw = server.post({"inputs": ANSWER, "parameters": {"max_new_tokens": limit}}, "/invocations").json()
        assert ANSWER in json.dumps(raw).replace('\\"', '"')
        assert said in server.log


def test_a_broken_response_template_of_an_option_stops_the_start(tmp_path: Path) -> None:
    directory = tiny.make(tmp_path / "tiny")
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": {"fields": {}}}))
    given = options(f"option.echo_tokenizer={directory}", "option.reasoning_parser=hf")
    refused = pytest.raises(
        AssertionError, match=r"tokenizer_config\.json: response_template\.fields: must have at least one of"
    )
    with refused, serve("--engine", "echo", *given) as server:
        server.wait_ready()

"""LMI's `handle` of a model.py in the embedded server: what it gets, what its answers become, what it cannot harm."""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest

from handler.engines import s3
from tests.app.server import AppServer, refused_start, serve
from tests.servers import PATIENCE, http, post_bytes, wait_for
from tests.user_files import write_model

VLLM = "engine=Python\noption.async_mode=true\noption.entryPoint=djl_python.lmi_vllm.vllm_async_service\n"
ECHO = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}

ALONE = """
import sys
import threading
import time
from typing import Optional

import numpy as np
from djl_python import Input, Output

seen, left = [], []
released = threading.Event()


def parts(item):
    try:
        for word in ("one", "two"):
            yield word
            time.sleep(float(item.get_property("x-pause") or 0))
            if item.contains_key("hold"):
                released.wait()
        if item.contains_key("break"):
            raise RuntimeError("amid")
    finally:
        left.append("stream")


def handle(inputs: Input) -> Optional[Output]:
    seen.append(inputs.get_properties())
    if inputs.is_empty():
        return None
    match inputs.get_as_string("do") if inputs.contains_key("do") else "":
        case "raise":
            raise ValueError("as asked")
        case "exit":
            sys.exit("bye")
        case "memory":
            raise MemoryError
        case "error":
            return Output().error("not this", 401)
        case "type":
            return {"a": 1}
        case "none":
            return None
        case "code":
            return Output(code=207, message="so").add("text").add_property("X-Mine", 7).add_property("Host", "x")
        case "empty":
            return Output(code=204).add("text")
        case "length":
            return Output().add("text").add_property("Content-Length", 2).add_property("Transfer-Encoding", "gzip")
        case "split":
            return Output().add("text").add_property("X-Mine", "a\\r\\nb: c")
        case "numpy":
            return Output().add_as_json({"array": np.array([1.5]), "one": np.int64(2)})
        case "first":
            return Output().add(seen[0])
        case "left":
            return Output().add(left)
        case "lines":
            return Output().add_property("content-type", "application/jsonlines").add_stream_content(parts(inputs))
        case "raw":
            return Output().add_stream_content(parts(inputs), None)
        case "sleep":
            time.sleep(0.3)
        case "hang":
            time.sleep(100)
    fields = {key: inputs.get_as_string(key) for key in inputs.get_content().get_keys()}
    given = {key: inputs.get_property(key) for key in ("Content-Type", "x-seen", "custom", "model_dir", "handler")}
    return Output().add_as_json({"fields": fields, "given": given}).add_property("Content-Type", "application/json")
"""


def properties(directory: Path, text: str, options: str = "") -> Path:
    file = write_model(directory, text)
    file.write_text(options)
    return file


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    options = "engine=Python\noption.model_id=org/model\noption.my_own=value\noption.predict_timeout=4\n"
    file = properties(tmp_path_factory.mktemp("alone"), ALONE, options)
    with serve("--properties", str(file)) as server:
        server.wait_ready()
        yield server


def do(server: AppServer, what: str, **more: Any) -> httpx.Response:
    return http.post(server.url + "/invocations", params={"do": what}, content=b"body", **more)


# -- alone -------------------------------------------------------------------------------------------------------


def test_the_first_call_has_the_options_and_no_contents(alone: AppServer) -> None:
    first = do(alone, "first").json()
    assert first["model_dir"]
    wanted = {
        "engine": "Python", "model_id": "org/model", "my_own": "value", "predict_timeout": "4", "handler": "handle",
        "tensor_parallel_degree": 1, "device_id": "-1", "model_dir": first["model_dir"],
    }  # fmt: skip
    assert first == wanted
    assert "no engine is loaded: handle in model.py serves its routes" in alone.log
    assert "handle of model.py, without an engine" in alone.log
    adapter = http.post(alone.url + "/adapters", params={"name": "a", "src": "/nowhere"})
    assert (adapter.status_code, "handle of model.py answers the requests" in adapter.text) == (400, True)


def test_a_call_gets_body_query_form_headers_and_attributes(alone: AppServer) -> None:
    headers = {
        "X-Amzn-SageMaker-Custom-Attributes": "custom=one ; other",
        "X-Seen": "yes",
        "content-type": "text/plain",
    }
    found = http.post(alone.url + "/predictions/model?q=1%202", content="é".encode(), headers=headers)
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    model_dir = found.json()["given"]["model_dir"]
    assert found.json() == {
        "fields": {"q": "1 2", "data": "é"},
        "given": {
            "Content-Type": "text/plain", "x-seen": "yes", "custom": "one", "model_dir": model_dir, "handler": "handle",
        },
    }  # fmt: skip
    form = http.post(alone.url + "/models/model/invoke", data={"a": "b c", "d": ""})
    assert form.json()["fields"] == {"a": "b c", "d": ""}
    curls = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post(alone.url + "/invocations", content=b'{"a": 1}', headers=curls).json()["fields"] == {
        "data": '{"a": 1}'
    }


@pytest.mark.parametrize(
    ("what", "status", "headers", "body"),
    [
        ("none", 204, {}, b""),
        ("empty", 204, {}, b""),
        ("length", 200, {"content-length": "4"}, b"text"),
        ("raise", 424, {"content-type": "application/json"},
         b'{\n  "code":424,\n  "message":"prediction failure",\n  "error":"as asked"\n}'),
        ("exit", 424, {}, b'{\n  "code":424,\n  "message":"prediction failure",\n  "error":"bye"\n}'),
        ("memory", 507, {}, b""),
        ("error", 401, {}, b'{\n  "code":401,\n  "message":"prediction failure",\n  "error":"not this"\n}'),
        ("type", 424, {},
         b'{\n  "code":424,\n  "message":"prediction failure",\n  "error":"Invalid output type: <class \'dict\'>"\n}'),
        ("code", 207, {"x-mine": "7"}, b"text"),
        ("split", 424, {},
         b'{\n  "code":424,\n  "message":"prediction failure",\n'
         b'  "error":"property \'x-mine\' is not a valid HTTP header"\n}'),
        ("numpy", 200, {}, b'{\n  "array":[\n    1.5\n  ],\n  "one":2\n}'),
        ("lines", 200, {"content-type": "application/jsonlines"}, b'{"outputs": "one"}\n{"outputs": "two"}\n'),
        ("raw", 200, {}, b"onetwo"),
    ],
)  # fmt: skip
def test_an_output_becomes_djls_answer(
    alone: AppServer, what: str, status: int, headers: dict[str, str], body: bytes
) -> None:
    found = do(alone, what)
    assert (found.status_code, found.content) == (status, body)
    assert headers.items() <= dict(found.headers).items()
    assert found.headers["x-request-id"]
    assert "host" not in found.headers
    if what in ("code", "raw", "memory"):
        assert "content-type" not in found.headers  # DJL adds none


def test_a_stream_that_breaks_off_ends_with_its_error(alone: AppServer) -> None:
    found = http.post(alone.url + "/invocations", params={"do": "raw", "break": "1"}, content=b"x")
    assert found.content == b'onetwo{"error":"amid","code":424}\n'


def test_what_djl_refuses_is_refused(alone: AppServer) -> None:
    assert (found := do(alone, "", headers={"handler": "other"})).status_code == 400
    assert "handler can't be overridden" in found.text
    assert do(alone, "", headers={"content-type": "multipart/form-data; boundary=x"}).status_code == 415
    other = http.post(alone.url + "/predictions/other", content=b"x")
    assert other.status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v2/models/model/generate", "/tokenize"])
def test_no_engine_answers_on_other_routes(alone: AppServer, path: str) -> None:
    found = alone.post({"prompt": "a", "inputs": "a"}, path)
    assert (found.status_code, "no engine is loaded" in found.text) == (404, True)


def test_a_call_that_hangs_is_given_up_and_stops_no_other(alone: AppServer) -> None:
    with ThreadPoolExecutor() as pool:
        hung = pool.submit(do, alone, "hang")
        wait_for(lambda: alone.ping() == 200, 5, "the event loop stands")
        later = pool.submit(do, alone, "")
        assert alone.ping() == 200
        assert (hung.result().status_code, later.result().status_code) == (503, 200)
    assert "handle of model.py did not end within 4 s" in hung.result().text
    assert "handle of model.py did not end within 4 s" in alone.log
    assert hung.result().headers["retry-after"]


def test_the_end_of_a_client_is_noticed(alone: AppServer) -> None:
    before = do(alone, "left").json()
    with http.stream("POST", alone.url + "/invocations?do=raw", content=b"x", headers={"x-pause": "0.2"}) as stream:
        next(stream.iter_raw())
    wait_for(lambda: len(do(alone, "left").json()) > len(before), 20, "the generator was not closed")
    with socket.create_connection(("127.0.0.1", alone.port)) as client:
        client.sendall(b"POST /invocations?do=sleep HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\nx")
    assert do(alone, "").status_code == 200


def test_a_client_of_http_1_0_gets_a_stream_as_it_comes(alone: AppServer) -> None:
    head = b"POST /invocations?do=raw&hold=1 HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\nx"
    with socket.create_connection(("127.0.0.1", alone.port), timeout=PATIENCE) as client:
        client.sendall(head)
        data = b""
        while not data.endswith(b"\r\n\r\none"):
            data += client.recv(1 << 16)
        sys.modules["model"].released.set()
        assert b"".join(iter(lambda: client.recv(1 << 16), b"")) == b"two"
    assert b"length" not in data
    assert b"chunked" not in data


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from djl_python import Output\ndef handle(i):\n    return Output().error('bad', 507)\n", "initialize"),
        ("handle = 3\n", "handle is a int, not a function"),
        ("def handle():\n    pass\n", "handle must take one argument"),
        (
            "import time\ndef handle(i):\n    time.sleep(60)\n",
            r"did not end within 5 s \(option.model_loading_timeout\)",
        ),
        ("import nowhere_at_all\ndef handle(i):\n    pass\n", "line 1: ModuleNotFoundError"),
    ],
)
def test_a_handle_that_cannot_begin_stops_the_start(text: str, words: str, tmp_path: Path) -> None:
    file = properties(tmp_path, text, "option.model_loading_timeout=5\n")
    assert re.search(words, refused_start("--properties", str(file)).replace("\n", " "))


def test_a_first_call_that_raises_stops_the_start_with_its_traceback(tmp_path: Path) -> None:
    file = properties(tmp_path, "def handle(inputs):\n    raise OSError('no weights')\n")
    with pytest.raises(AssertionError, match="the server ended"), serve("--properties", str(file)) as server:
        server.wait_ready()
    with serve("--engine", "echo", "--properties", str(file)) as server:  # it is tried first, and may fail
        server.wait_ready()
        assert "OSError: no weights" in server.log
        assert server.post(ECHO).text == '{"error":"Custom handler failed: no weights","code":424}'


def test_a_model_on_s3_is_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    downloaded = []

    def download(url: str, only: Sequence[str] = ()) -> Path:
        downloaded.append([*only])
        return tmp_path / url.rpartition("/")[2]

    monkeypatch.setattr(s3, "download", download)
    text = """
from djl_python import Output

found = []


def handle(inputs):
    found.append(inputs.get_property("model_id"))
    return None if inputs.is_empty() else Output().add(found[0])
"""
    file = str(properties(tmp_path, text, "option.model_id=s3://bucket/x\n"))
    for engine in ((), ("--engine", "echo")):
        with serve("--properties", file, *engine) as server:
            server.wait_ready()
            assert server.post({}).text == str(tmp_path / "x")
    everything, without_weights = downloaded
    assert everything == []
    assert "*.json" in without_weights
    assert not any(fnmatch("model.safetensors", pattern) for pattern in without_weights)


# -- batches -----------------------------------------------------------------------------------------------------

BATCH = """
from djl_python import Input, Output


def handle(inputs: Input):
    if inputs.is_empty():
        return None
    texts = [item.get_as_json()["text"] for item in inputs.get_batches()]
    if "raise" in texts:
        raise ValueError(str(len(texts)))
    output = Output().add_property("x-batch", inputs.get_batch_size())
    if not inputs.is_batch():
        return output.add(texts[0])
    keys = sorted(inputs.get_content().get_keys())
    assert keys[0] == "batch_000.data" and inputs.get_property("batch_001.Content-Type") == "application/json"
    for place, text in enumerate(texts):
        if text != "lost":
            output.add(f"{text} of {len(texts)}", key="data", batch_index=place)
    return output
"""


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    file = properties(tmp_path_factory.mktemp("batch"), BATCH, "batch_size=3\nmax_batch_delay=2000\n")
    with serve("--properties", str(file)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["a", "b", "c"], [(200, "a of 3"), (200, "b of 3"), (200, "c of 3")]),
        (["raise", "b", "c"], [(424, '"error":"3"')] * 3),
        (["a", "b", "lost"], [(400, "Batch output size mismatch")] * 3),
        (["a"], [(200, "a")]),
    ],
)
def test_a_dynamic_batch_is_one_call(batches: AppServer, texts: list[str], wanted: list[tuple[int, str]]) -> None:
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda text: batches.post({"text": text}), texts))
    for answer, (status, text) in zip(found, wanted, strict=True):
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
        if status == 200:
            assert answer.headers["x-batch"] == str(len(texts))


# -- before the engine -------------------------------------------------------------------------------------------

FIRST = """
import asyncio
import json
import time
from djl_python import Input, Output
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output, handle_streaming_response
from djl_python.encode_decode import decode

calls, left = [], []


async def words():
    for word in ("one", "two"):
        await asyncio.sleep(0.01)
        yield word


async def wait():
    try:
        await asyncio.sleep(100)
    finally:
        left.append("wait")


async def chunks(breaks):
    yield create_stream_chunk_output({"text": "one"}, False)
    if breaks:
        raise RuntimeError("amid")
    yield create_stream_chunk_output({"text": "two"}, True)


async def codes():
    for code in (200, 299, 300, 200):
        yield Output(code).add(str(code))


async def endless():
    yield create_stream_chunk_output({"text": "one"}, False)
    await wait()


async def handle(inputs: Input):
    calls.append(inputs.is_empty())
    if inputs.is_empty():
        raise RuntimeError("the first call may fail")
    body = decode(inputs.get_batches()[0], inputs.get_property("Content-Type"))
    match body.get("do"):
        case "answer":
            return create_non_stream_output({"custom_handler_used": True}, properties={"x-mine": 1})
        case "error":
            return create_non_stream_output("", error="no <such> thing", code=418)
        case "hand":
            return Output().add_as_json({"by": "hand"})
        case "map":
            return Output().add(Output.binary_encode({"data": "mapped", "last": True}))
        case "part":
            return create_stream_chunk_output({"text": "one"}, False)
        case "chunks":
            return chunks(False)
        case "break":
            return chunks(True)
        case "codes":
            return codes()
        case "endless":
            return endless()
        case "stream":
            return handle_streaming_response(words(), lambda chunk: (chunk, chunk == "two"))
        case "raise":
            raise ValueError("as asked")
        case "wait":
            await wait()
        case "left":
            return create_non_stream_output({"left": left})
        case "block":
            time.sleep(0.5)
            return create_non_stream_output("blocked")
        case "hang":
            time.sleep(30)
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    file = properties(tmp_path_factory.mktemp("first"), FIRST, VLLM + "option.predict_timeout=3\n")
    with serve("--engine", "echo", "--properties", str(file)) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize(
    ("what", "status", "media", "body"),
    [
        ("answer", 200, "application/json", b'{"custom_handler_used": true}\n'),
        ("error", 418, "application/json", b'{"error":"no <such> thing","code":418}'),
        ("raise", 424, "application/json", b'{"error":"Custom handler failed: as asked","code":424}'),
        ("hand", 200, None, b'{\n  "by":"hand"\n}'),
        ("map", 200, None, b"mapped"),
        ("part", 424, "application/json", b'{"error":"Custom handler failed: the Output has last=False, but handle '
         b"is called only once per request, unlike in DJL Serving's rolling batch; return the whole response, or an "
         b'asynchronous generator of Outputs","code":424}'),
        ("chunks", 200, "application/jsonlines", b'{"text": "one"}\n{"text": "two"}\n'),
        ("stream", 200, "application/jsonlines", b"one\ntwo\n"),
        ("break", 200, "application/jsonlines", b'{"text": "one"}\n{"error":"amid","code":424}\n'),
        ("codes", 200, None, b"200299300\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions"])
def test_the_handle_is_tried_first(
    first: AppServer, what: str, status: int, media: str | None, body: bytes, path: str
) -> None:
    found = first.post({"do": what}, path)
    assert (found.status_code, found.headers.get("content-type"), found.content) == (status, media, body)
    if what == "answer":
        assert found.headers["x-mine"] == "1"


def test_what_it_answers_with_none_goes_to_the_engine(first: AppServer) -> None:
    assert first.post(ECHO).content == b'{"generated_text":" a b"}\n'
    streamed = first.post({**ECHO, "stream": True})
    assert (streamed.headers["content-type"], len(streamed.text.splitlines())) == ("application/jsonlines", 4)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert first.post(chat, "/v1/chat/completions").json()["object"] == "chat.completion"
    assert first.post({"prompt": "a", "max_tokens": 1}, "/v1/completions").status_code == 200


def test_calls_run_side_by_side_and_end_with_their_clients(first: AppServer) -> None:
    with socket.create_connection(("127.0.0.1", first.port)) as client:
        client.sendall(b'POST /invocations HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 13\r\n\r\n{"do":"wait"}')
        assert first.post({"do": "answer"}).status_code == 200
    wait_for(lambda: first.post({"do": "left"}).json()["left"] == ["wait"], 20, "the call was not cancelled")
    assert first.post({"do": "wait"}).status_code == 503


def test_a_stream_takes_room_until_its_end(tmp_path: Path) -> None:
    file = properties(tmp_path, FIRST, VLLM + "job_queue_size=1\n")
    with serve("--engine", "echo", "--properties", str(file)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(post_bytes({"do": "endless"}))
            found = b""
            while b"one" not in found:
                found += client.recv(4096)
            assert server.post({"do": "answer"}).status_code == 503
            assert "the queue is full (job_queue_size=1)" in server.log
        wait_for(lambda: server.post({"do": "answer"}).status_code == 200, 20, "the room was not given back")


def test_a_blocking_coroutine_stops_no_ping_and_a_hung_one_is_replaced(first: AppServer) -> None:
    with ThreadPoolExecutor() as pool:
        blocked = pool.submit(first.post, {"do": "block"})
        assert first.ping() == 200
        assert blocked.result().content == b"blocked\n"
        hung = pool.submit(first.post, {"do": "hang"})
        assert hung.result().status_code == 503
        wait_for(lambda: "its thread is replaced" in first.log, 20, "the loop was not replaced")
        assert first.post({"do": "answer"}).status_code == 200


# -- LMI's own handlers ------------------------------------------------------------------------------------------

OWN = [
    "from djl_python.huggingface import handle\n",
    "import djl_python.tensorrt_llm\nhandle = djl_python.tensorrt_llm.handle\n",
    "from handler.entry import handle\n",
    "from djl_python.huggingface import handle as theirs\ndef handle(inputs):\n    return theirs(inputs)\n",
    "from djl_python.lmi_vllm.vllm_async_service import handle as theirs\nasync def handle(inputs):\n"
    "    return await theirs(inputs)\n",
    """
from djl_python.huggingface import HuggingFaceService

_service = HuggingFaceService()


def handle(inputs):
    if not _service.initialized:
        _service.initialize(inputs.get_properties())
    return None if inputs.is_empty() else _service.inference(inputs)
""",
    """
from djl_python import Input, Output


class Template:
    def __init__(self):
        self.ready = False

    def initialize(self, inputs):
        from djl_python.huggingface import handle
        self._handle = handle
        self.ready = True


template = Template()


def handle(inputs: Input) -> Output:
    if not template.ready:
        template.initialize(inputs)
    return template._handle(inputs)
""",
]


@pytest.mark.parametrize("text", OWN)
def test_lmis_own_handlers_mean_the_engine(text: str, tmp_path: Path) -> None:
    file = properties(tmp_path, text, "option.entryPoint=model.py\n")
    with serve("--properties", str(file), env={"OPTION_LLM_ENGINE": "echo"}) as server:
        server.wait_ready()
        assert server.post(ECHO).content == b'{"generated_text":" a b"}'
        streamed = server.post({**ECHO, "stream": True})
        assert len(streamed.text.splitlines()) == 2
        assert "no engine is loaded" not in server.log


def test_a_handle_changes_what_the_engine_gets(tmp_path: Path) -> None:
    text = """
import json
from djl_python.huggingface import handle as engines


def handle(inputs):
    if not inputs.is_empty():
        body = inputs.get_as_json()
        inputs.content["data"] = json.dumps({"inputs": body["question"], **body}).encode()
    return engines(inputs)
"""
    with serve("--properties", str(properties(tmp_path, text)), env={"OPTION_LLM_ENGINE": "echo"}) as server:
        server.wait_ready()
        asked = {"question": "x y", "parameters": {"max_new_tokens": 2}}
        assert server.post(asked).json() == {"generated_text": " x y"}


@pytest.mark.parametrize(
    "line",
    ["_service.parse_input = print\n", "class Own(HuggingFaceService):\n    def parse_input(self):\n        pass\n"],
)
def test_what_nothing_calls_of_lmis_services_is_refused_by_name(line: str, tmp_path: Path) -> None:
    text = f"from djl_python.huggingface import HuggingFaceService\n_service = HuggingFaceService()\n{line}"
    text += "def handle(inputs):\n    return _service.inference(inputs)\n"
    said = refused_start("--properties", str(properties(tmp_path, text)))
    assert "parse_input is not called here; write @input_formatter" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("option.entryPoint=djl_python.huggingface\n", "because option.entryPoint is djl_python.huggingface"),
        ("option.entryPoint=handler.entry\n", "because option.entryPoint is handler.entry"),
    ],
)
def test_a_handle_that_lmi_would_not_call_is_named_and_not_called(options: str, words: str, tmp_path: Path) -> None:
    file = properties(tmp_path, "def handle(inputs):\n    raise OSError\n", options)
    with serve("--properties", str(file), env={"OPTION_LLM_ENGINE": "echo"}) as server:
        server.wait_ready()
        assert server.post(ECHO).status_code == 200
        assert words in server.log


SLOW = """
import pathlib
import time
from djl_python import Output


def handle(inputs):
    if not inputs.is_empty():
        pathlib.Path(__file__).with_name("called").touch()
    time.sleep({})
    return Output().add("x")
"""


def test_a_queue_has_its_end(tmp_path: Path) -> None:
    text = SLOW.format(1)
    with serve("--properties", str(properties(tmp_path, text, "job_queue_size=2\n"))) as server:
        server.wait_ready()
        with ThreadPoolExecutor(8) as pool:
            found = [answer.status_code for answer in pool.map(lambda _: server.post({}), range(8))]
    assert set(found) == {200, 503}
    assert found.count(200) >= 3


def test_a_stop_waits_for_the_answer(tmp_path: Path) -> None:
    text = SLOW.format(1)
    with serve("--properties", str(properties(tmp_path, text))) as server:
        server.wait_ready()
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(server.post({}).status_code))
        asking.start()
        wait_for((tmp_path / "called").exists, 20, "the request has not come")
        assert server.stop() == 0
        asking.join(20)
    assert found == [200]

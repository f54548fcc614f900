"""DJL itself, with small handlers: what our front end shows of it, and workers that cannot start."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.djl.launch import StartFailed
from tests.djl.processes import group_members
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import http, wait_for

pytestmark = pytest.mark.djl

# -- small handlers in DJL's own terms, each the text of a model.py, for the tests of DJL itself -----------------------


# One word of the prompt a step. The body: inputs; wait, seconds before each step of it; error, the end after the words.
SMALL_ROLLING = """
import time

from djl_python import Output

live = []


def handle(inputs):
    if inputs.is_empty():
        return None
    for item in inputs.get_batches()[len(live):]:
        body = item.get_as_json()
        live.append(body | {"words": [word + " " for word in body["inputs"].split()], "new": True})
    time.sleep(max(body.get("wait", 0) for body in live))
    output = Output()
    for place, body in enumerate(live):
        reply = {"data": body["words"].pop(0) if body["words"] else ""}
        reply["last"] = not body["words"]
        if reply["last"] and "error" in body:
            reply |= {"code": 424, "error": body["error"]}
        if body.pop("new", False):
            output.add_property(f"batch_{place}_Content-Type", "text/x-words")
        output.add(Output.binary_encode(reply), key="data", batch_index=place)
    live[:] = [body for body in live if body["words"]]
    return output
"""

# How many requests came together, and the words of each.
SMALL_DYNAMIC = """
from djl_python import Output


def handle(inputs):
    if inputs.is_empty():
        return None
    output, batch = Output(), inputs.get_batches()
    for index, item in enumerate(batch):
        if item.get_as_json()["inputs"] == "bad":
            raise ValueError("a bad one")
        output.add(f"{len(batch)} {item.get_as_json()['inputs']}", key="data", batch_index=index)
    return output
"""

# One word of the prompt at a time, as a server-sent event.
SMALL_ASYNC = """
import asyncio

from djl_python import Output


async def handle(inputs):
    return Output() if inputs.is_empty() else stream(inputs.get_as_json())


met = 0


async def stream(body):
    global met
    words, meet = body["inputs"].split(), body.get("meet", 0)
    met += bool(meet)
    while met < meet:
        await asyncio.sleep(0.01)
    for index, word in enumerate(words):
        await asyncio.sleep(body.get("wait", 0))
        output = Output()
        output.add_property("Content-Type", "text/event-stream")
        output.add(Output.binary_encode({"data": f"data: {word}\\n\\n", "last": index == len(words) - 1}))
        yield output
"""

# What a request looks like from inside, in plain mode.
MIRROR = """
from djl_python import Output


def handle(inputs):
    if inputs.is_empty():
        return None
    content = inputs.get_content()
    contents = {content.key_at(i): bytes(content.value_at(i)).decode() for i in range(content.size())}
    output = Output(201, "As You Like It")
    output.add_property("X-Mirror", "yes")
    return output.add_as_json({"properties": inputs.get_properties(), "contents": contents})
"""

FAILS_TO_LOAD = """
def handle(inputs):
    raise RuntimeError("there are no weights here")
"""

FAILS_TO_IMPORT = "import a_package_that_nobody_has"

# Leaves a process behind, as a handler with an engine process of its own must not.
LITTERS = """
import subprocess

subprocess.Popen(["sleep", "1000"])


def handle(inputs):
    return None
"""


# -- front -------------------------------------------------------------------------------------------------------------
# DJL itself, with small hand-written handlers: what our front end shows of it, and that it starts and ends cleanly.


TEXT = "one two three four five six seven eight"
ROLLING = {"option.rolling_batch": "auto", "option.max_rolling_batch_size": "8"}
DYNAMIC = {"batch_size": "3", "max_batch_delay": "1000"}  # 0.25 takes any rolling_batch for one, "disable" too
ASYNC = {"option.async_mode": "true", "option.rolling_batch": "disable"}


@pytest.fixture(scope="module", params=versions())
def rolling(request: pytest.FixtureRequest) -> Iterator[tuple[str, DjlServer]]:
    with djl(request.param, ROLLING, {"model.py": SMALL_ROLLING}) as server:
        yield request.param, server


@pytest.fixture(scope="module", params=versions())
def dynamic(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    with djl(request.param, DYNAMIC, {"model.py": SMALL_DYNAMIC}) as server:
        yield server


@pytest.fixture(scope="module", params=versions())
def plain(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    with djl(request.param, {}, {"model.py": MIRROR}) as server:
        yield server


@pytest.fixture(scope="module", params=versions())
def strict(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    limits = {"SERVING_MAX_REQUEST_SIZE": "1000", "SERVING_CHUNKED_READ_TIMEOUT": "1"}
    with djl(request.param, ROLLING, {"model.py": SMALL_ROLLING}, env=limits) as server:
        yield server


@pytest.fixture(scope="module", params=versions(since="0.31"))
def asynchronous(request: pytest.FixtureRequest) -> Iterator[DjlServer]:
    with djl(request.param, ASYNC, {"model.py": SMALL_ASYNC}) as server:
        yield server


def test_rolling_batch_gives_every_request_its_own_words(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    texts = [f"{letter} " * length for length, letter in enumerate("abcdef", start=3)]
    with ThreadPoolExecutor(len(texts)) as pool:
        replies = list(pool.map(lambda text: server.post({"inputs": text, "wait": 0.01}), texts))
    assert [reply.text for reply in replies] == texts
    # 0.25 names the type itself and knows no headers for one request.
    content_type = "text/x-words" if newer(version, "0.28") else "application/json"
    assert {reply.headers["content-type"] for reply in replies} == {content_type}


def test_error_in_the_batch_has_its_status_where_the_version_can_carry_one(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    reply = server.post({"inputs": "", "error": 'no "good" é'})
    assert reply.json() == {"code": 424, "error": 'no "good" é'}
    assert reply.status_code == (424 if newer(version, "0.31") else 200)
    if newer(version, "0.31"):
        assert reply.headers["connection"] == "close"
        assert reply.reason_phrase.startswith('no "good"')
        assert "content-length" in reply.headers


def test_error_with_a_line_break_cannot_be_a_status_line(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    reply = server.post({"inputs": "", "error": "one\ntwo"})
    if newer(version, "0.31"):
        assert reply.status_code == 500
    else:
        assert (reply.status_code, reply.json()["error"]) == (200, "one\ntwo")


def test_first_piece_arrives_before_the_last_is_made(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    times, pieces = [], []
    with http.stream("POST", server.url + "/invocations", json={"inputs": TEXT, "wait": 0.1}, timeout=30) as reply:
        assert reply.headers["transfer-encoding"] == "chunked"
        for piece in reply.iter_raw():
            times.append(time.monotonic())
            pieces.append(piece.decode())
    assert "".join(pieces) == TEXT + " "
    assert times[-1] - times[0] > 0.4
    # 0.25 sends the first word at once and then four at a time.
    expected = [word + " " for word in TEXT.split()]
    assert pieces == (expected if newer(version, "0.28") else ["one ", "two three four five ", "six seven eight "])


def test_a_client_that_goes_away_breaks_nothing(rolling: tuple[str, DjlServer]) -> None:
    _, server = rolling
    for _ in range(10):  # more than fit in the batch at once
        with http.stream("POST", server.url + "/invocations", json={"inputs": TEXT, "wait": 0.02}) as reply:
            next(reply.iter_raw())
    assert server.post({"inputs": "still here"}).text == "still here "


def test_short_reply_has_a_length_since_0_31(rolling: tuple[str, DjlServer]) -> None:
    version, server = rolling
    reply = server.post({"inputs": "word"})
    assert reply.text == "word "
    assert reply.headers.get("content-length") == ("5" if newer(version, "0.31") else None)


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions", "/predictions/model", "/models/model/invoke"])
def test_routes_of_the_model(rolling: tuple[str, DjlServer], path: str) -> None:
    assert rolling[1].post({"inputs": "a b"}, path=path).text == "a b "


@pytest.mark.parametrize("path", ["/", "/nothing", "/v1/models", "/v1/completions", "/predictions/other"])
def test_other_routes_are_not_found(rolling: tuple[str, DjlServer], path: str) -> None:
    reply = rolling[1].post({"inputs": "a b"}, path=path)
    assert (reply.status_code, reply.json()["code"]) == (404, 404)
    kind = "ModelNotFoundException" if path.endswith("other") else "ResourceNotFoundException"
    assert reply.json()["type"] == kind


def test_ping(rolling: tuple[str, DjlServer]) -> None:
    reply = http.get(rolling[1].url + "/ping")
    assert (reply.status_code, reply.json()) == (200, {"model": {"status": "Healthy"}})


@pytest.mark.parametrize(
    "header", [{"handler": "x"}, {"Handler": "x"}, {"X-Amzn-SageMaker-Custom-Attributes": "a=b;handler=x"}]
)
def test_a_request_cannot_choose_the_function(rolling: tuple[str, DjlServer], header: dict[str, str]) -> None:
    reply = rolling[1].post({"inputs": "a b"}, headers=header)
    assert (reply.status_code, reply.json()["code"]) == (400, 400)
    assert reply.json()["message"] == "The handler can't be overridden in a request"
    assert r"can\u0027t" in reply.text  # as Gson writes it


def test_dynamic_batch_of_three(dynamic: DjlServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda text: dynamic.post({"inputs": text}).text, ["a", "b", "c"]))
    assert replies == ["3 a", "3 b", "3 c"]


def test_dynamic_batch_sends_a_lone_request_after_the_delay(dynamic: DjlServer) -> None:
    began = time.monotonic()
    assert dynamic.post({"inputs": "alone"}).text == "1 alone"
    assert 0.9 < time.monotonic() - began < 30


def test_exception_outside_the_rolling_batch_is_424(dynamic: DjlServer) -> None:
    reply = dynamic.post({"inputs": "bad"})
    assert (reply.status_code, reply.json()["error"]) == (424, "a bad one")
    assert dynamic.post({"inputs": "good"}).text == "1 good"


def test_what_a_handler_sees_of_a_request(plain: DjlServer) -> None:
    headers = {"X-Own": "1", "X-Amzn-SageMaker-Custom-Attributes": "first=a;second=b=c"}
    reply = plain.post({"é": 1}, path="/invocations?q=a%20b", headers=headers)
    assert (reply.status_code, reply.reason_phrase) == (201, "As You Like It")
    assert reply.headers["x-mirror"] == "yes"
    seen = reply.json()
    assert seen["contents"] == {"q": "a b", "data": '{"é":1}'}
    expected = {"X-Own": "1", "first": "a", "second": "b=c", "Content-Type": "application/json", "handler": "handle"}
    assert expected.items() <= seen["properties"].items()
    assert "X-Amzn-SageMaker-Custom-Attributes" not in seen["properties"]


def test_a_form_is_contents_and_no_data(plain: DjlServer) -> None:
    reply = http.post(plain.url + "/invocations", data={"a": "1 2", "b": "é"})
    assert reply.json()["contents"] == {"a": "1 2", "b": "é"}


def test_chunked_request(plain: DjlServer) -> None:
    reply = http.post(plain.url + "/invocations", content=iter([b"ab", b"", b"c" * 5000]))
    assert reply.json()["contents"] == {"data": "ab" + "c" * 5000}


def test_body_above_the_limit_is_413(strict: DjlServer) -> None:
    assert strict.post({"inputs": "a " * 400}).status_code == 200
    reply = strict.post({"inputs": "a " * 1_000_000})
    assert (reply.status_code, reply.content) == (413, b"")


def test_no_piece_in_time_resets_the_connection(strict: DjlServer) -> None:
    with pytest.raises(httpx.ReadError):
        strict.post({"inputs": "late", "wait": 2})
    time.sleep(1.5)  # the handler is still at it; the next request would wait for the same step
    assert strict.post({"inputs": "early"}).text == "early "


def test_async_mode(asynchronous: DjlServer) -> None:
    times, pieces = [], []
    body = {"inputs": "a b c d", "wait": 0.2}
    with http.stream("POST", asynchronous.url + "/v1/chat/completions", json=body, timeout=30) as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        for piece in reply.iter_raw():
            times.append(time.monotonic())
            pieces.append(piece)
    assert pieces == [f"data: {word}\n\n".encode() for word in "abcd"]
    assert times[-1] - times[0] > 0.4


def test_async_mode_serves_many_at_once(asynchronous: DjlServer) -> None:
    with ThreadPoolExecutor(8) as pool:  # each waits until all are there
        replies = list(pool.map(lambda i: asynchronous.post({"inputs": f"w{i}", "meet": 8}).text, range(8)))
    assert replies == [f"data: w{i}\n\n" for i in range(8)]


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (FAILS_TO_LOAD, "RuntimeError: there are no weights here"),
        (FAILS_TO_IMPORT, "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
    ],
    ids=["load", "import"],
)
def test_failing_start_ends_at_once_with_the_reason(version: str, model: str, reason: str) -> None:
    said = ""
    for _ in range(3):  # Java stops the worker and its readers together, and may lose the worker's last words
        began = time.monotonic()
        with pytest.raises(StartFailed) as failed, djl(version, ROLLING, {"model.py": model}):
            pass
        if "DJL_SERVING_HOME" not in os.environ:  # which tries again for 30 s
            assert time.monotonic() - began < 90
        said = str(failed.value)
        if reason in said:
            break
    assert reason in said


@pytest.mark.parametrize("version", versions("0.30"))
@pytest.mark.parametrize(("threshold", "deaths"), [(None, 1), ("1", 2)])
def test_a_model_is_given_up_after_its_workers_deaths(version: str, threshold: str | None, deaths: int) -> None:
    """Since 0.30 one is enough, unless `retry_threshold` says otherwise."""
    properties = {**ROLLING, **({"retry_threshold": threshold} if threshold else {})}
    with djl(version, properties, {"model.py": SMALL_ROLLING}) as server:
        for death in range(1, deaths + 1):
            assert http.get(server.url + "/ping").status_code == 200
            with http.stream("POST", server.url + "/invocations", json={"inputs": TEXT, "wait": 0.2}) as reply:
                next(reply.iter_raw())
                os.kill(server.worker_pid(), signal.SIGKILL)
            if death < deaths:
                wait_for(lambda: server.status({"inputs": "a"}) == 200, 30, "no worker")
        wait_for(lambda: http.get(server.url + "/ping").status_code == 500, 20, "/ping does not tell")
        assert http.get(server.url + "/ping").json() == {"model": {"status": "FAILED"}}
        assert server.post({"inputs": "a"}).status_code == 503
        # Java has started one more worker, which nobody connects to: it waits for 30 s, also beyond Java's end.
        for pid in group_members(server.process.pid).keys() - {server.process.pid}:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("version", versions("0.31"))
@pytest.mark.parametrize("mode", ["rolling", "async"])
def test_a_worker_that_dies_at_rest_is_replaced_in_async_mode_alone(version: str, mode: str) -> None:
    """Java notices it otherwise only when a call is under way: docs/djl.md says so."""
    properties, model = (ROLLING, SMALL_ROLLING) if mode == "rolling" else (ASYNC, SMALL_ASYNC)
    with djl(version, {**properties, "retry_threshold": "10"}, {"model.py": model}) as server:
        if mode == "async":
            os.kill(server.worker_pid(), signal.SIGKILL)
            wait_for(lambda: server.status({"inputs": "a"}) == 200, 30, "no worker")
        else:
            for _ in range(5):  # a call that comes before Java has noticed the death has it start another worker
                pid = server.worker_pid()
                os.kill(pid, signal.SIGKILL)
                end = f"stopped - W-{pid}-model-stdout"
                wait_for(lambda end=end: end in server.log, 30, "its output does not end")
                time.sleep(0.5)
                if server.status({"inputs": "a"}) == 400:
                    break
                wait_for(lambda: server.status({"inputs": "a"}) == 200, 30, "no worker")
            assert server.post({"inputs": "a"}).json()["message"] == "Backend Python process is stopped."
            assert http.get(server.url + "/ping").status_code == 200


def test_nothing_is_left_after_stop() -> None:
    with djl(versions()[-1], ROLLING, {"model.py": SMALL_ROLLING}) as server:
        assert len(group_members(server.process.pid)) >= 2
        assert server.worker_pid() in group_members(server.process.pid)
    assert not group_members(server.process.pid)


def test_a_process_that_outlives_its_worker_is_reported_and_ended() -> None:
    with (
        pytest.raises(AssertionError, match=r"still there 5 s after the end of DJL: .*sleep 1000"),
        djl(versions()[-1], ROLLING, {"model.py": LITTERS}) as server,
    ):
        pass
    wait_for(lambda: not group_members(server.process.pid), 5, "it was not ended")


# -- start -------------------------------------------------------------------------------------------------------------
# A worker that cannot start says why, at once and in one line; one that can, in each shape of model directory.


OURS = {"option.entryPoint": "handler.entry", "option.rolling_batch": "auto"}
ECHO = {**OURS, "option.llm_engine": "echo"}


WRONG = {
    "unknown option": ({**ECHO, "option.max_rolling_batch_sise": "3"}, "did you mean 'option.max_rolling_batch_size'?"),
    "wrong value": ({**ECHO, "option.dtype": "int99"}, "option.dtype=int99: must be one of"),
    "two at once": (
        {**ECHO, "option.dtype": "int99", "option.tgi_compt": "true"},
        "2 problems: 1. serving.properties, line",
    ),
    "engine missing": ({**OURS, "option.llm_engine": "vllm"}, "the engine 'vllm'"),
    "no such model": ({**OURS, "option.model_id": "/nowhere"}, "there is no model at '/nowhere'"),
    "no model": (OURS, "option.model_id is not set"),
}
"""Each is asked of one version, by turns: Java hands on whatever line the worker ends with."""


@pytest.mark.parametrize(("version", "wrong"), [*zip(itertools.cycle(versions()), WRONG, strict=False)])
def test_a_wrong_start_says_why_at_once(version: str, wrong: str) -> None:
    properties, told = WRONG[wrong]
    began = time.monotonic()
    with pytest.raises(StartFailed) as failed, djl(version, properties):
        pass
    assert told in str(failed.value)
    assert time.monotonic() - began < 90  # Java would wait longer


@pytest.mark.parametrize("version", versions()[-1:])
def test_a_missing_package_is_named_under_djl(version: str) -> None:
    """A module in the model directory comes before the installed one."""
    broken = {"orjson.py": "raise ImportError(\"No module named 'orjson'\")\n"}
    with pytest.raises(StartFailed) as failed, djl(version, ECHO, broken):
        pass
    assert "the handler cannot start: No module named 'orjson'" in str(failed.value)


@pytest.mark.parametrize("version", versions())
def test_the_environment_sets_options(version: str) -> None:
    env = {"OPTION_LLM_ENGINE": "echo", "OPTION_TGI_COMPAT": "true", "SERVING_ROLLING_BATCH_BUFFER": "1"}
    with djl(version, OURS, env=env) as server:
        body = {"inputs": "a b", "parameters": {"max_new_tokens": 2, "details": False}}
        assert server.post(body).json() == [{"generated_text": " a b"}]

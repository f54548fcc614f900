"""A model.py's formatters in the embedded server: what clients get, and that bad ones harm nobody else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from handler.plugins.formatter_thread import FormatterThread
from tests.app.server import serve
from tests.servers import LiveServer, http, options, wait_for
from tests.user_files import ANSWER, LEGACY, LEGACY_ANSWER, LINES, OWN, PAYLOADS, write_model

BAD = """
import time
from pathlib import Path
from handler.formatters import input_formatter, output_formatter

CALLS = {"number": 3, "none": None, "bytes": b"x", "half": "\\ud800"}


def act(cue):
    if cue == "raise":
        raise ValueError("as asked")
    if cue == "exit":
        raise SystemExit(3)
    if cue == "interrupt":
        raise KeyboardInterrupt
    if cue == "late":
        time.sleep(1.2)
        raise ValueError("too late")
    if cue.startswith("until"):
        file = Path(cue.removeprefix("until"))
        file.with_suffix(".begun").touch()
        while not file.exists():
            time.sleep(0.01)
    if cue.startswith("sleep"):
        time.sleep(float(cue.removeprefix("sleep")))


@input_formatter
def read(decoded_payload: dict, **kwargs) -> dict:
    cue = decoded_payload.pop("bad_input", "")
    act(cue)
    return CALLS[cue] if cue in CALLS else decoded_payload


@output_formatter
def write(request_output):
    cue, _, when = request_output.input.input_text.partition(" ")[0].partition("@")
    sequence = request_output.sequences[0]
    if cue == "never":
        return f"{len(sequence.tokens)} "
    token, index, first, last = sequence.get_next_token()
    if index == int(when or 0):
        act(cue)
        if cue in CALLS:
            return CALLS[cue]
    return token.text
"""
"""A request's first word, `cue@token`, says what the output formatter does, `bad_input` what the input formatter."""


@pytest.fixture(scope="module")
def lines_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    properties = write_model(tmp_path_factory.mktemp("lines"), OWN + LINES)
    with serve("--engine", "echo", "--properties", str(properties)) as server:
        yield server


@pytest.fixture(scope="module")
def bad_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    properties = write_model(tmp_path_factory.mktemp("bad"), BAD)
    properties.write_text("option.echo_cues=true\noption.echo_tokens_per_second=200\n")
    one_second = mock.patch.object(FormatterThread.__init__, "__defaults__", (1.0,))
    with one_second, serve("--engine", "echo", "--properties", str(properties)) as server:
        yield server


def ask(prompt: str, *, stream: bool = False, tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens}, "stream": stream, **more}


@pytest.mark.parametrize(("stream", "media"), [(False, "application/json"), (True, "application/jsonlines")])
def test_reading_and_writing(lines_server: LiveServer, stream: bool, media: str) -> None:
    found = lines_server.post({"question": "a b", "stream": stream})
    assert (found.status_code, found.headers["content-type"], found.text) == (200, media, ANSWER)
    assert ("content-length" in found.headers) is not stream


def test_the_output_formatter_sees_the_input_formatters_own_fields(lines_server: LiveServer) -> None:
    assert json.loads(lines_server.post({"question": "a", "tokens": 1, "shout": True}).text)["text"] == " A"


def test_any_content_type_reaches_an_input_formatter(lines_server: LiveServer) -> None:
    found = http.post(
        lines_server.url + "/invocations", content=b'{"question": "a b"}', headers={"content-type": "text/csv"}
    )
    assert found.text == ANSWER


def test_its_result_is_checked(lines_server: LiveServer) -> None:
    found = lines_server.post({"question": "a", "more": {"top_p": 7}})
    assert (found.status_code, found.json()["error"][:18]) == (424, "parameters.top_p=7")
    found = lines_server.post({"question": "a", "more": {"foo": 7}})
    assert found.headers["x-lmi-ignored-parameters"] == "parameters.foo"


def test_a_missing_key_is_that_requests_error(lines_server: LiveServer) -> None:
    found = lines_server.post({"inputs": "a"})
    assert (found.status_code, found.json()["code"]) == (424, 424)
    assert found.json()["error"] == "input formatter 'read_question' of model.py raised KeyError: 'question'"
    assert "input formatter 'read_question' of model.py failed\nTraceback" in lines_server.log
    assert 'model.py", line 15, in read_question' in lines_server.log
    assert lines_server.post({"question": "a b"}).text == ANSWER


def test_many_at_once_keep_their_own(lines_server: LiveServer) -> None:
    def one(number: int) -> str:
        return lines_server.post({"question": f"x{number}", "tokens": 40, "stream": bool(number % 2)}).text

    with ThreadPoolExecutor(32) as pool:
        for number, answer in enumerate(pool.map(one, range(64))):
            found = [json.loads(line) for line in answer.splitlines()]
            assert [line["index"] for line in found] == list(range(40))
            assert {line["text"] for line in found} == {f" x{number}"}


def test_legacy_formatters(tmp_path: Path) -> None:
    with serve("--engine", "echo", "--properties", str(write_model(tmp_path, LEGACY))) as server:
        for stream in (True, False):
            assert server.post(ask("a b", stream=stream)).text == LEGACY_ANSWER


def test_formatters_of_payloads(tmp_path: Path) -> None:
    properties = write_model(tmp_path, PAYLOADS)
    with serve("--engine", "echo", "--properties", str(properties), "-o", "option.tgi_compat=true") as server:
        (found,) = server.post({"inputPrompt": "a b"}).json()
        assert found["wrapped"]["generated_text"] == " a b a"
        lines = server.post({"inputPrompt": "a b", "stream": True}).text.split("\n\n")
        assert [list(json.loads(line[6:])) for line in lines if line] == [["wrapped"]] * 3


def test_an_input_formatter_in_a_dynamic_batch(tmp_path: Path) -> None:
    properties = write_model(tmp_path, PAYLOADS)
    properties.write_text("option.rolling_batch=disable\noption.output_formatter=json\n")
    with serve("--engine", "echo", "--properties", str(properties)) as server:
        found = server.post({"inputPrompt": ["a", "b"], "parameters": {"max_new_tokens": 1}}).json()
        assert found == [{"generated_text": " a"}, {"generated_text": " b"}]


def test_a_start_with_a_broken_model_py_is_refused(tmp_path: Path) -> None:
    properties = write_model(tmp_path, "import nowhere_at_all\n")
    with (
        pytest.raises(AssertionError, match=r"model\.py, line 1: ModuleNotFoundError: No module named 'nowhere_at"),
        serve("--engine", "echo", "--properties", str(properties)),
    ):
        pass


READ = """
from handler.formatters import input_formatter

@input_formatter
def read(decoded_payload: dict, **kwargs) -> dict:
    return {"inputs": decoded_payload["mine"]}
"""

WRITE = """
from handler.formatters import output_formatter

@output_formatter
def write(request_output):
    return "mine"
"""


def test_an_output_formatter_of_vectors_stops_the_start(tmp_path: Path) -> None:
    properties = write_model(tmp_path, WRITE)
    embed = options("option.task=embed")
    message = r"model\.py's output formatter 'write' is for generated text; option\.task=text-embedding"
    with (
        pytest.raises(AssertionError, match=message),
        serve("--engine", "echo", "--properties", str(properties), *embed),
    ):
        pass
    left_out = options("option.output_formatter=json")
    with serve("--engine", "echo", "--properties", str(properties), *embed, *left_out) as server:
        assert len(server.post({"inputs": "a"}).json()) == 8


def test_an_input_formatter_reads_texts_to_embed(tmp_path: Path) -> None:
    properties = write_model(tmp_path, READ)
    with serve("--engine", "echo", "--properties", str(properties), *options("option.task=embed")) as server:
        mine, own = server.post({"mine": ["a", "b"]}), server.post({"inputs": ["a", "b"]}, "/embed")
        assert (mine.status_code, mine.json()) == (200, own.json())


# -- bad code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cue", "wanted"),
    [
        ("raise", "raised ValueError: as asked"),
        ("exit", "raised SystemExit: 3"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("none", "returned None"),
        ("number", "returned int"),
        ("bytes", "returned bytes"),
    ],
)
def test_each_failure_is_one_requests(bad_server: LiveServer, cue: str, wanted: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(bad_server.post, ask("a b", tokens=200, stream=bool(n % 2))) for n in range(4)]
        bad_input = bad_server.post(ask("a", bad_input=cue))
        whole = bad_server.post(ask(f"{cue}@1 b"))
        at_once = bad_server.post(ask(f"{cue} b", stream=True))
        # A busy machine may bring tokens at once: then some before the failure are not sent, or it is a 424.
        tries = (bad_server.post(ask(f"{cue}@2 b", stream=True)) for _ in range(9))
        midway = next(found for found in tries if found.text.startswith(f" {cue}@2 b"))
        texts = {neighbour.result().text for neighbour in neighbours}
    for found in (bad_input, whole, at_once):
        assert (found.status_code, found.json()["code"]) == (424, 424)
        assert wanted in found.json()["error"]
        assert "model.py" in found.json()["error"]
    assert midway.status_code == 200
    sent, _, failure = midway.text.partition("{")
    assert sent == f" {cue}@2 b"
    assert wanted in json.loads("{" + failure)["error"]
    assert texts == {" a b" * 100}


def test_text_that_is_none(bad_server: LiveServer) -> None:
    assert "a lone surrogate" in bad_server.post(ask("half b")).json()["error"]


@pytest.mark.parametrize("stream", [True, False])
def test_one_that_takes_no_token_ends(bad_server: LiveServer, stream: bool) -> None:
    assert bad_server.post(ask("never", stream=stream)).text == "1 2 3 "


@pytest.mark.parametrize("hung", [ask("a", bad_input="sleep600"), ask("sleep600@1 b", stream=True)])
def test_one_that_hangs_fails_alone(bad_server: LiveServer, hung: dict[str, Any]) -> None:
    """All requests wait for the one thread, and are answered when the hung call's time is up; the engine works on."""
    plain = ask("a b", parameters={"max_new_tokens": 40, "output_formatter": "jsonlines"})
    with ThreadPoolExecutor(16) as pool:
        under_way = pool.submit(bad_server.post, plain)  # read before, written without a formatter
        wait_for(lambda: bad_server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        first = pool.submit(bad_server.post, hung)
        neighbours = [pool.submit(bad_server.post, ask("a b", tokens=50, stream=bool(n % 2))) for n in range(8)]
        assert bad_server.ping() == 200
        assert len(under_way.result().text.splitlines()) == 40
        told = json.loads(first.result().text.removeprefix(" sleep600@1"))
        what = "input formatter 'read'" if "bad_input" in hung else "output formatter 'write'"
        assert told["error"] == f"{what} of model.py did not end within 1 s"
        assert {one.result().text for one in neighbours} == {" a b" * 25}


def test_requests_without_a_formatter_end_while_one_hangs(tmp_path: Path) -> None:
    """It hangs until there is a file, and has ten seconds."""
    free = tmp_path / "free"
    properties = str(write_model(tmp_path, BAD))
    with serve("--engine", "echo", "--properties", properties) as server, ThreadPoolExecutor(1) as pool:
        hung = pool.submit(server.post, ask("a b", bad_input=f"until{free}"))
        wait_for((tmp_path / "free.begun").exists, 5, "it is not called")
        assert len(server.post(ask("a b", tokens=40), "/generate").json()["generated_text"].split()) == 40
        assert not hung.done()
        free.touch()
        assert hung.result().text == " a b a"


def test_one_that_raises_too_late_is_forgotten(bad_server: LiveServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post(bad_server.url + "/invocations", json=ask("a", bad_input="late"), timeout=0.5)
    assert bad_server.post(ask("late b")).status_code == 424
    assert bad_server.post(ask("a b")).text == " a b a"
    time.sleep(0.4)
    assert "never retrieved" not in bad_server.log
    assert "a bug" not in bad_server.log


def test_a_client_that_leaves_takes_its_formatting_along(bad_server: LiveServer) -> None:
    with http.stream("POST", bad_server.url + "/invocations", json=ask("a b", stream=True, tokens=4000)) as found:
        assert next(found.iter_bytes())
    assert bad_server.post(ask("a b")).text == " a b a"


def test_an_engines_failure_ends_a_stream_with_an_error(bad_server: LiveServer) -> None:
    found = bad_server.post(ask("a <raise>", stream=True, tokens=9))
    assert found.text.startswith(" a{")
    assert json.loads(found.text.removeprefix(" a"))["code"] == 424
    bad_server.wait_ready()
    assert bad_server.post(ask("<raise>")).status_code == 424
    bad_server.wait_ready()


@pytest.mark.model
@pytest.mark.nightly
def test_the_model_through_formatters(demo_model: Path, tmp_path: Path) -> None:
    properties = write_model(tmp_path, OWN + LINES)
    with serve(str(demo_model), "--properties", str(properties)) as server:
        server.wait_ready(120)
        asked = {"question": "The capital of France is", "tokens": 8}
        whole = server.post(asked).text
        assert server.post({**asked, "stream": True}).text == whole
        text = "".join(json.loads(line)["text"] for line in whole.splitlines())
        plain = server.post({**asked, "more": {"output_formatter": "json"}}).json()
        assert plain == {"generated_text": text}
        assert "Paris" in text

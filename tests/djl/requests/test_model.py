"""The demo model says through DJL what it says through the embedded server; what model directories may look like."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.checks import CHAT, EMOJI, PARIS
from tests.djl.servers import DjlServer, djl, newer, versions
from tests.servers import http, serve

pytestmark = [pytest.mark.djl, pytest.mark.long]

MODES = {"rolling": {"option.rolling_batch": "auto"}, "async": {"option.async_mode": "true"}}
PLACES = [(version, mode) for mode in MODES for version in versions(since="0.31" if mode == "async" else "0")]

PROMPTS = {"paris": PARIS, "emoji": EMOJI}
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


Post = Callable[[Any], httpx.Response]


@pytest.fixture(scope="module")
def embedded(demo_model: Path) -> Iterator[Post]:
    """What the embedded server answers; the same body is sent once."""
    known: dict[str, httpx.Response] = {}
    with serve(str(demo_model), "-o", "option.dtype=fp32") as server:
        server.wait_ready()

        def post(body: Any) -> httpx.Response:
            key = json.dumps(body)
            if key not in known:
                known[key] = server.post(body)
            return known[key]

        yield post


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def server(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[DjlServer]:
    """A directory with nothing but serving.properties."""
    version, mode = request.param
    options = {
        "option.entryPoint": "handler.entry",
        "option.model_id": str(demo_model),
        "option.dtype": "fp32",
        "option.lmi_version": "0.28",  # whose schema these tests know, in each mode
    }
    with djl(version, {**options, **MODES[mode]}) as found:
        yield found


def ask(prompt: str, **parameters: Any) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": 16, **parameters}}


def lines(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def close(value: Any) -> Any:
    """Equal to what is `value` but for the last digits of numbers: the order of additions is the machine's."""
    if isinstance(value, dict):
        return {name: close(each) for name, each in value.items()}
    if isinstance(value, list):
        return [close(each) for each in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


@pytest.mark.model
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_answers_are_the_embedded_servers(server: DjlServer, embedded: Post, name: str) -> None:
    body = ask(PROMPTS[name], details=True, decoder_input_details=name == "paris")
    wanted = embedded(body).json()
    assert wanted["details"]["generated_tokens"] == 16
    assert wanted["generated_text"].startswith({"paris": " Paris", "emoji": "👩"}[name])
    assert server.post(body).json() == close(wanted)


@pytest.mark.model
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_streams_are_the_embedded_servers(server: DjlServer, embedded: Post, name: str) -> None:
    body = {**ask(PROMPTS[name], details=True), "stream": True}
    found = lines(server.post(body))
    assert found == close(lines(embedded(body)))
    assert "".join(line["token"]["text"] for line in found) == found[-1]["generated_text"]
    assert len(found) == 16


@pytest.mark.model
def test_greedy_chats_are_the_embedded_servers(server: DjlServer, embedded: Post) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16, "logprobs": True}
    wanted, found = (_settled(each.json()) for each in (embedded(body), server.post(body)))
    assert "Paris" in wanted["choices"][0]["message"]["content"]
    assert found == close(wanted)


@pytest.mark.model
def test_greedy_chats_stream_as_the_embedded_servers(server: DjlServer, embedded: Post) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16, "logprobs": True, "stream": True}
    wanted, found = (lines(each) for each in (embedded(body), server.post(body)))
    assert "Paris" in "".join(line["choices"][0]["delta"]["content"] for line in wanted)
    assert len({line["id"] for line in found}) == 1
    assert [_settled(line) for line in found] == [close(_settled(line)) for line in wanted]


def _settled(value: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers to the same request."""
    return {name: each for name, each in value.items() if name not in ("id", "created")}


@pytest.mark.model
def test_a_seed_gives_the_embedded_servers_text(server: DjlServer, embedded: Post) -> None:
    body = ask(PARIS, do_sample=True, seed=7, temperature=0.8)
    assert server.post(body).json() == embedded(body).json()


@pytest.mark.model
def test_a_prompt_of_a_megabyte_is_refused_and_neighbours_go_on(
    server: DjlServer, embedded: Post, request: pytest.FixtureRequest
) -> None:
    version, mode = request.node.callspec.params["server"]
    early = mode == "rolling" and not newer(version, "0.29")  # a step's end settles the status, refused or not
    long = ask("hello " * 175_000)
    bodies = [{**ask(prompt, max_new_tokens=90, ignore_eos_token=True), "stream": True} for prompt in (PARIS, CHAT)]
    begun = threading.Barrier(3, timeout=30)

    def neighbour(body: Any) -> tuple[str, float]:
        with http.stream("POST", server.url + "/invocations", json=body, timeout=60) as answer:
            found = answer.iter_lines()
            next(found)
            begun.wait()
            *_, last = found
        return json.loads(last)["generated_text"], time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        neighbours = [pool.submit(neighbour, body) for body in bodies]
        begun.wait()
        for body in (long, {**long, "stream": True}):
            answer = server.post(body)
            assert answer.status_code == 424 or (early and answer.status_code == 200)
            assert answer.json()["code"] == 424
            assert "'inputs' has at least" in answer.json()["error"]
        refused = time.monotonic()
        texts, ends = zip(*(each.result() for each in neighbours), strict=True)
    assert min(ends) > refused
    assert list(texts) == [lines(embedded(body))[-1]["generated_text"] for body in bodies]


# -- model directories -----------------------------------------------------------------------------------------------

MODEL_PY = "from handler.entry import handle\n"
ECHO = {"option.llm_engine": "echo"}


@pytest.mark.parametrize(("version", "mode"), PLACES)
def test_a_model_py_that_imports_the_handler_needs_no_entry_point(version: str, mode: str) -> None:
    with djl(version, {**ECHO, **MODES[mode]}, {"model.py": MODEL_PY}) as server:
        found = server.post({"inputs": "a b", "parameters": {"max_new_tokens": 3, "details": True}}).json()
        assert (found["generated_text"], found["details"]["generated_tokens"]) == (" a b a", 3)


@pytest.mark.model
@pytest.mark.parametrize("version", versions())
def test_the_model_beside_serving_properties_is_served(version: str, demo_model: Path) -> None:
    """No option.model_id. The file is linked there by the directory's own code, before that loads the handler.

    0.36 executes that code several times.
    """
    link = f"import os\n\nif not os.path.lexists('demo.gguf'):\n    os.symlink({str(demo_model)!r}, 'demo.gguf')\n"
    with djl(version, {"option.rolling_batch": "auto"}, {"model.py": link + MODEL_PY}) as server:
        assert server.post(ask(PARIS, max_new_tokens=1)).json() == {"generated_text": " Paris"}

"""Whatever a client sends to TGI's routes or MindIE's, it gets an answer with a meaning, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.protocols.tgi.native import PARAMETERS
from tests.app.fuzz.test_lmi import MODEL, chats, prompts, values
from tests.app.server import serve
from tests.servers import LiveServer

names = st.sampled_from([*PARAMETERS]) | st.text(max_size=10)
bodies = st.fixed_dictionaries(
    {"inputs": st.text(max_size=30) | values},
    optional={"parameters": st.dictionaries(names, values, max_size=4) | values, "stream": st.booleans() | values},
)
paths = st.sampled_from(["/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize"])


@pytest.fixture(scope="module", params=["tgi", "mindie"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    limits = ("-o", "option.max_model_len=40", "-o", f"option.root_schema={request.param}")
    with serve("--engine", "echo", *limits) as found:
        found.wait_ready()
        yield found
        assert "a bug" not in found.log
        assert "Traceback" not in found.log


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, headers={"content-type": "application/json"}) as found:
        yield found


def check(found: httpx.Response) -> None:
    if found.headers["content-type"] == "application/json":
        value = json.loads(found.content)
        assert found.status_code in (200, 400, 422), found.text
        if found.status_code != 200:
            assert value["error"]
            assert value.get("error_type", "validation") == "validation"
        return
    assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream")
    *events, end = found.text.split("\n\n")
    assert (end, bool(events)) == ("", True)
    for event in events:
        assert event.startswith("data: {")
        json.loads(event.removeprefix("data: "))


def posted(client: httpx.Client, url: str, body: Any) -> httpx.Response:
    try:
        data = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        data = json.dumps(body).encode()
    return client.post(url, content=data)


@given(path=paths, body=bodies | chats | values)
def test_any_json_at_all(server: LiveServer, client: httpx.Client, path: str, body: Any) -> None:
    check(posted(client, server.url + path, body))


@given(path=paths, data=st.binary(max_size=200))
def test_any_bytes_at_all(server: LiveServer, client: httpx.Client, path: str, data: bytes) -> None:
    check(client.post(server.url + path, content=data))


def inside(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, exclude_min=True, exclude_max=True)


valid = {
    "do_sample": st.booleans(),
    "temperature": inside(1e-30, 1e30),
    "repetition_penalty": inside(1e-30, 1e30),
    "frequency_penalty": st.floats(-2, 2),
    "top_k": st.integers(1, 49_151),
    "top_p": inside(0, 1),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=4),
    "truncate": st.integers(1, 5),
    "details": st.booleans(),
    "decoder_input_details": st.booleans(),
    "return_full_text": st.booleans() | st.none(),
    "seed": st.integers(1, 2**64 - 1) | st.none(),
    "best_of": st.integers(0, 2) | st.none(),
}


@pytest.mark.model
@MODEL
@given(prompt=prompts, stream=st.booleans(), parameters=st.fixed_dictionaries({}, optional=valid))
def test_what_the_ranges_allow_never_fails_in_the_model(
    model_server: LiveServer, client: httpx.Client, prompt: str, stream: bool, parameters: dict[str, Any]
) -> None:
    """A 422 is our own refusal; the engine refuses nothing that we let through, and breaks on nothing."""
    model_server.wait_ready()
    body = {"inputs": prompt, "stream": stream, "parameters": {"max_new_tokens": 4, **parameters}}
    found = posted(client, model_server.url + "/", body)
    check(found)
    assert "Request failed" not in found.text, body

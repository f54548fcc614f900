"""Whatever a client sends, it gets an answer with a meaning: no 500, no hang, and the server goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.protocols.kernel.messages import ROLES
from handler.protocols.kernel.parameters import REQUEST_FIELDS
from handler.protocols.lmi.chat import TABLE as CHAT
from handler.protocols.lmi.request import TABLE
from handler.protocols.tgi.native import PARAMETERS
from handler.protocols.triton.request import INPUTS
from tests.app.server import serve
from tests.servers import LiveServer

scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from([0, 1, -1, 2, 0.5, 1e308, "", "a", "json", "sse"])
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*TABLE.parameters, *REQUEST_FIELDS]) | st.text(max_size=10)
bodies = st.fixed_dictionaries(
    {"inputs": st.text(max_size=30) | values},
    optional={"parameters": st.dictionaries(names, values, max_size=6) | values, "stream": st.booleans() | values},
)

parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.text(max_size=9) | values})
contents = st.text(max_size=20) | st.lists(parts | values, max_size=3) | values
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(ROLES) | values, "content": contents}), max_size=3)
chats = st.fixed_dictionaries(
    {"messages": messages | values},
    optional=dict.fromkeys([*CHAT.parameters, "stream", "inputs", "adapters", "other"], values),
)

inputs = st.dictionaries(st.sampled_from([*INPUTS]) | st.text(max_size=10), values, max_size=6)
tritons = st.builds(
    lambda prompt, id, names, nested: {**names, "text_input": prompt, **id, **nested},
    st.text(max_size=30) | values,
    st.fixed_dictionaries({}, optional={"id": st.text(max_size=5) | values}),
    inputs,
    st.fixed_dictionaries({}, optional={"parameters": inputs | values}),
)


@pytest.fixture(scope="module", params=["lmi", "tgi_compat", "dynamic_batch"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    option = {"tgi_compat": "option.tgi_compat=true", "dynamic_batch": "option.rolling_batch=disable"}.get(
        request.param
    )
    limits = ["-o", "option.max_model_len=200"]
    with serve("--engine", "echo", *limits, *(["-o", option] if option else [])) as found:
        yield found
        assert "a bug" not in found.log
        assert "Traceback" not in found.log


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as found:
        yield found


def check(found: httpx.Response) -> None:
    assert found.status_code in (200, 400, 424), found.text
    if found.headers["content-type"] == "application/json":
        value = json.loads(found.content)
        if found.status_code == 424:
            assert value["code"] == 424
            assert value["error"]
    else:
        lines = [line.removeprefix("data: ") for line in found.text.split("\n") if line not in ("", "data: [DONE]")]
        assert lines
        for line in lines:
            json.loads(line)


@given(body=bodies | chats | tritons)
def test_bodies_of_the_right_shape_with_anything_in_them(server: LiveServer, client: httpx.Client, body: Any) -> None:
    try:
        data = json.dumps(body, allow_nan=True).encode()
    except UnicodeEncodeError:
        data = json.dumps(body, ensure_ascii=True).encode()
    check(client.post(server.url + "/invocations", content=data, headers={"content-type": "application/json"}))


@given(body=tritons | values, end=st.sampled_from(["generate", "generate_stream"]))
def test_tritons_bodies_with_anything_in_them(server: LiveServer, client: httpx.Client, body: Any, end: str) -> None:
    found = client.post(f"{server.url}/v2/models/model/{end}", content=json.dumps(body).encode())
    assert found.status_code in (200, 400), found.text
    if found.headers["content-type"] == "application/json":
        assert json.loads(found.content).keys() >= ({"error"} if found.status_code == 400 else set())
    else:
        *events, rest = found.text.split("\n\n")
        assert (rest, found.headers["content-type"]) == ("", "text/event-stream; charset=utf-8")
        assert all("error" in value or "text_output" in value for value in map(_event, events))


def _event(text: str) -> Any:
    return json.loads(text.removeprefix("data: "))


@given(body=values)
def test_any_json_at_all(server: LiveServer, client: httpx.Client, body: Any) -> None:
    check(client.post(server.url + "/invocations", content=json.dumps(body).encode()))


@given(data=st.binary(max_size=200))
def test_any_bytes_at_all(server: LiveServer, client: httpx.Client, data: bytes) -> None:
    check(client.post(server.url + "/invocations", content=data))


@given(data=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_no_http_do_no_harm(server: LiveServer, client: httpx.Client, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert client.get(server.url + "/ping").status_code == 200


valid = {
    "do_sample": st.booleans(),
    "seed": st.integers(0, 2**64 - 1),
    "temperature": st.floats(0, 1e30) | st.sampled_from([0, 1e-45, 1e-38, 3e38]),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1, exclude_max=True),
    "repetition_penalty": st.floats(1e-30, 1e30),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "stop_sequences": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 49_151), max_size=3),
    "ignore_eos_token": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "min_length": st.integers(0, 4),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 3),
    "num_beams": st.integers(1, 3),
    "length_penalty": st.floats(-1e6, 1e6),
    "early_stopping": st.booleans(),
    "truncate": st.integers(1, 5),
    "details": st.booleans(),
    "decoder_input_details": st.booleans(),
    "return_full_text": st.booleans(),
    "end_id": st.integers(-1, 49_151),
    "pad_id": st.integers(-1, 49_151),
    "stop_words_list": st.lists(st.integers(0, 49_151), max_size=3).map(lambda ids: [ids, [*range(1, len(ids) + 1)]]),
    "return_log_probs": st.booleans(),
    "runtime_top_k": st.integers(-1, 2**31 - 1).map(lambda k: [k]),
    "runtime_top_p": st.floats(0, 1).map(lambda p: [p]),
}
MODEL = settings(max_examples=settings.default.max_examples // 4)  # type: ignore[union-attr]
"""Examples cost a model's time."""

prompts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@pytest.mark.model
@MODEL
@given(prompt=prompts, stream=st.booleans(), parameters=st.fixed_dictionaries({}, optional=valid))
def test_what_the_ranges_allow_never_fails_in_the_model(
    model_server: LiveServer, client: httpx.Client, prompt: str, stream: bool, parameters: dict[str, Any]
) -> None:
    """A 424 is our own refusal, by name; the engine refuses nothing that we let through, and breaks on nothing."""
    body = {"inputs": prompt, "stream": stream, "parameters": {"max_new_tokens": 4, **parameters}}
    found = client.post(model_server.url + "/invocations", content=json.dumps(body).encode())
    check(found)
    assert "in the engine" not in found.text, body
    assert "engine failure" not in found.text, body


# -- tgi ---------------------------------------------------------------------------------------------------------------
# Whatever a client sends to TGI's routes or MindIE's, it gets an answer with a meaning, and the server goes on.


tgi_names = st.sampled_from([*PARAMETERS]) | st.text(max_size=10)
tgi_bodies = st.fixed_dictionaries(
    {"inputs": st.text(max_size=30) | values},
    optional={"parameters": st.dictionaries(tgi_names, values, max_size=4) | values, "stream": st.booleans() | values},
)
paths = st.sampled_from(["/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize"])


@pytest.fixture(scope="module", params=["tgi", "mindie"])
def tgi_server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    limits = ("-o", "option.max_model_len=40", "-o", f"option.root_schema={request.param}")
    with serve("--engine", "echo", *limits) as found:
        found.wait_ready()
        yield found
        assert "a bug" not in found.log
        assert "Traceback" not in found.log


@pytest.fixture(scope="module")
def tgi_client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, headers={"content-type": "application/json"}) as found:
        yield found


def tgi_check(found: httpx.Response) -> None:
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


@given(path=paths, body=tgi_bodies | chats | values)
def test_any_json_at_all_to_tgis_routes(tgi_server: LiveServer, tgi_client: httpx.Client, path: str, body: Any) -> None:
    tgi_check(posted(tgi_client, tgi_server.url + path, body))


@given(path=paths, data=st.binary(max_size=200))
def test_any_bytes_at_all_to_tgis_routes(
    tgi_server: LiveServer, tgi_client: httpx.Client, path: str, data: bytes
) -> None:
    tgi_check(tgi_client.post(tgi_server.url + path, content=data))


def inside(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(least, most, exclude_min=True, exclude_max=True)


tgi_valid = {
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
@given(prompt=prompts, stream=st.booleans(), parameters=st.fixed_dictionaries({}, optional=tgi_valid))
def test_what_tgis_ranges_allow_never_fails_in_the_model(
    model_server: LiveServer, tgi_client: httpx.Client, prompt: str, stream: bool, parameters: dict[str, Any]
) -> None:
    """A 422 is our own refusal; the engine refuses nothing that we let through, and breaks on nothing."""
    model_server.wait_ready()
    body = {"inputs": prompt, "stream": stream, "parameters": {"max_new_tokens": 4, **parameters}}
    found = posted(tgi_client, model_server.url + "/", body)
    tgi_check(found)
    assert "Request failed" not in found.text, body

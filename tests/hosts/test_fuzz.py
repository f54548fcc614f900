"""Whatever a client sends, it gets an answer with a meaning: no 500, no hang, and the server goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handler.schemas.parameters import PARAMETERS, REQUEST_FIELDS
from tests.servers import LiveServer, serve

QUIET = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from([0, 1, -1, 2, 0.5, 1e308, "", "a", "json", "sse"])
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*PARAMETERS, *REQUEST_FIELDS]) | st.text(max_size=10)
bodies = st.fixed_dictionaries(
    {"inputs": st.text(max_size=30) | values},
    optional={"parameters": st.dictionaries(names, values, max_size=6) | values, "stream": st.booleans() | values},
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
    with httpx.Client(timeout=10) as found:
        yield found


def check(found: httpx.Response) -> None:
    assert found.status_code in (200, 424), found.text
    if found.headers["content-type"] == "application/json":
        value = json.loads(found.content)
        if found.status_code == 424:
            assert value["code"] == 424
            assert value["error"]
    else:
        lines = [line.removeprefix("data: ") for line in found.text.split("\n") if line]
        assert lines
        for line in lines:
            json.loads(line)


@QUIET
@given(body=bodies)
def test_bodies_of_the_right_shape_with_anything_in_them(server: LiveServer, client: httpx.Client, body: Any) -> None:
    try:
        data = json.dumps(body, allow_nan=True).encode()
    except UnicodeEncodeError:
        data = json.dumps(body, ensure_ascii=True).encode()
    check(client.post(server.url + "/invocations", content=data, headers={"content-type": "application/json"}))


@QUIET
@given(body=values)
def test_any_json_at_all(server: LiveServer, client: httpx.Client, body: Any) -> None:
    check(client.post(server.url + "/invocations", content=json.dumps(body).encode()))


@QUIET
@given(data=st.binary(max_size=200))
def test_any_bytes_at_all(server: LiveServer, client: httpx.Client, data: bytes) -> None:
    check(client.post(server.url + "/invocations", content=data))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_no_http_do_no_harm(server: LiveServer, client: httpx.Client, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert client.get(server.url + "/ping").status_code == 200

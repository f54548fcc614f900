"""OpenAI's clients over WebSockets: Responses in lanes; and many sockets at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.clients.agents.scripted import Model, call, said_by, scripted
from tests.clients.driver import Driver, driving_node, of_mode, python_client
from tests.servers import LiveServer

pytestmark = pytest.mark.clients

QUESTION = "What is the capital of France?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY, "strict": False}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
_SCRIPT = "drive_openai_sockets"


@pytest.fixture(scope="module", params=[of_mode(mode, mode, mode) for mode in ("sync", "async")] + ["node"])
def responses_sockets(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Python's client in both modes, and the one for Node, which has no Realtime without TLS."""
    if request.param == "node":
        with driving_node("drive_openai") as driver:
            yield driver
    else:
        yield python_client("openai", _SCRIPT, request.param)


class Client:
    """One connection of the client.

    Args:
        resource: what it connects to, `responses` or `realtime`.
        certificate: file with the authority of the server's certificate, if the client is to check it.
    """

    def __init__(
        self, driver: Driver, server: LiveServer, resource: str, *, certificate: str | None = None, **query: str
    ) -> None:
        self._driver, self._url = driver, server.url
        more = {} if certificate is None else {"certificate": certificate}
        self.opening = driver.generate(server.url, resource, query=query, until=_OPENINGS[resource], **more)

    def call(self, *calls: tuple[str, Any], until: Any = ENDS, times: int = 1) -> list[Any]:
        """The events up to the last one of those that end the calls."""
        events: list[Any] = self._driver.generate(self._url, "", calls=calls, until=until, times=times)
        return events

    def create(self, **fields: Any) -> Any:
        """The response to a request whose events come alone."""
        return self.call(("response.create", asked(**fields)))[-1]["response"]


_OPENINGS = {"responses": (), "realtime": ("session.created",)}


def asked(input: Any = QUESTION, **fields: Any) -> dict[str, Any]:
    return {"model": "model", "input": input, "store": False, "temperature": 0, **fields}


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


# -- Responses ---------------------------------------------------------------------------------------------------------


def test_a_warm_up_and_turns_by_id(responses_sockets: Driver, model_server: LiveServer) -> None:
    client = Client(responses_sockets, model_server, "responses")
    warm = client.create(generate=False)
    assert (warm["status"], warm["output"]) == ("completed", [])
    first = client.create(input=[], previous_response_id=warm["id"])
    assert text_of(first) == "The capital of France is Paris."
    assert first["usage"]["input_tokens"] == warm["usage"]["input_tokens"]
    second = client.create(input="And of Italy?", previous_response_id=first["id"], max_output_tokens=16)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]


def test_a_stream_is_that_of_http(responses_sockets: Driver, model_server: LiveServer) -> None:
    events = Client(responses_sockets, model_server, "responses").call(("response.create", asked()))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(events[-1]["response"]) == "The capital of France is Paris."
    assert "stream_id" not in events[0]


def test_lanes_and_a_fork(responses_sockets: Driver, echo_server: LiveServer) -> None:
    client = Client(responses_sockets, echo_server, "responses")
    plan = asked("plan", stream_id="plan", max_output_tokens=40)
    risk = asked("risk", stream_id="risk", max_output_tokens=40)
    events = client.call(("response.create", plan), ("response.create", risk), times=2)
    by_lane: dict[str, list[Any]] = {"plan": [], "risk": []}
    for event in events:
        by_lane[event["stream_id"]].append(event)
    for name, lane in by_lane.items():
        assert [event["sequence_number"] for event in lane] == [*range(len(lane))]
        assert name in text_of(lane[-1]["response"])
    parent = by_lane["plan"][-1]["response"]
    fork = asked("fork", stream_id="critic", previous_response_id=parent["id"], max_output_tokens=4)
    further = asked("more", stream_id="plan", previous_response_id=parent["id"], max_output_tokens=4)
    begun = client.call(("response.create", fork), until=["response.in_progress"])
    rest = client.call(("response.create", further), times=2)
    ended = {event["stream_id"]: event["response"] for event in begun + rest if event["type"] in ENDS}
    assert {name: value["previous_response_id"] for name, value in ended.items()} == {
        "critic": parent["id"],
        "plan": parent["id"],
    }


@pytest.mark.parametrize(
    ("fields", "code", "param", "status"),
    [
        ({"previous_response_id": "resp_other"}, "previous_response_not_found", "previous_response_id", 400),
        ({"stream_id": "a b"}, "invalid_stream_id", "stream_id", 400),
        ({"model": "other"}, "model_not_found", "model", 404),
        ({"max_output_tokens": -1}, None, "max_output_tokens", 400),
    ],
)
def test_an_error_is_an_event(
    responses_sockets: Driver, echo_server: LiveServer, fields: Any, code: str | None, param: str | None, status: int
) -> None:
    client = Client(responses_sockets, echo_server, "responses")
    event = client.call(("response.create", {**asked(), **fields}))[-1]
    error = event["error"]
    assert (event["type"], event["status"], error.get("param")) == ("error", status, param)
    assert error.get("code") == code or code is None
    assert client.create(max_output_tokens=2)["status"] == "incomplete"  # the connection is open


def test_steering_is_refused(responses_sockets: Driver, echo_server: LiveServer) -> None:
    client = Client(responses_sockets, echo_server, "responses")
    steer = ("response.steer", {"previous_response_id": "resp_1", "input": "shorter"})
    event = client.call(steer, until=["response.steer.failed"])[-1]
    assert event["error"]["code"] == "steering_not_supported"


@pytest.fixture(scope="module")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with scripted(tmp_path_factory.mktemp("model")) as model:
        yield model


def test_twenty_calls_of_tools(responses_sockets: Driver, scripted_model: Model) -> None:
    """Each turn sends the result alone; the model reads all that went before."""

    def answer(prompt: str) -> str:
        results = said_by("tool", prompt)
        return call("weather", city=f"C{len(results)}") if len(results) < 20 else f"Read {' '.join(results)}."

    scripted_model.says(answer)
    client = Client(responses_sockets, scripted_model.front, "responses")
    response = client.create(tools=[WEATHER])
    while calls := [item for item in response["output"] if item["type"] == "function_call"]:
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": f"{item['arguments']}!"}
            for item in calls
        ]
        response = client.create(input=results, previous_response_id=response["id"], tools=[WEATHER])
    expected = [json.dumps({"city": f"C{number}"}) + "!" for number in range(20)]
    assert text_of(response) == f"Read {' '.join(expected)}."
    assert len(scripted_model.prompts) == 21


# -- many sockets at once ----------------------------------------------------------------------------------------------

SOCKETS, REQUESTS = 64, 20


def request_of(socket: int, number: int) -> dict[str, Any]:
    """One whose response no other request has."""
    return {"inputs": f"socket{socket} request{number}", "parameters": {"max_new_tokens": 3 + number % 3}}


async def over_sockets(url: str) -> list[list[str]]:
    """Each socket sends all its requests at once, every other one in a lane."""

    async def talk(socket: int) -> list[str]:
        async with connect(url, max_size=None, open_timeout=100, ping_interval=None) as connection:
            for number in range(REQUESTS):
                lane = {"stream_id": f"lane{number}"} if number % 2 else {}
                await connection.send(json.dumps({**request_of(socket, number), **lane}))
            responses = [json.loads(await connection.recv()) for _ in range(REQUESTS)]
        lanes = {f"lane{number}": number for number in range(REQUESTS)}
        in_order = [response for response in responses if "stream_id" not in response]
        by_number = {lanes[response["stream_id"]]: response for response in responses if "stream_id" in response}
        by_number.update(zip(range(0, REQUESTS, 2), in_order, strict=True))
        return [by_number[number]["generated_text"] for number in range(REQUESTS)]

    return await asyncio.gather(*map(talk, range(SOCKETS)))


async def over_http(url: str) -> list[list[str]]:
    async with httpx.AsyncClient(timeout=100) as client:

        async def talk(socket: int) -> list[str]:
            bodies = [request_of(socket, number) for number in range(REQUESTS)]
            return [(await client.post(url, json=body)).json()["generated_text"] for body in bodies]

        return await asyncio.gather(*map(talk, range(SOCKETS)))


def test_no_responses_of_many_sockets_are_crossed(echo_server: LiveServer) -> None:
    socket_url = echo_server.url.replace("http", "ws", 1) + "/invocations-bidirectional-stream"
    responses = asyncio.run(over_sockets(socket_url))
    assert responses == asyncio.run(over_http(f"{echo_server.url}/invocations"))
    assert len({text for texts in responses for text in texts}) == SOCKETS * REQUESTS

"""litellm's proxy as a client of WebSockets: it passes events on for the clients of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import trustme

from tests.clients.driver import Driver, python_client
from tests.clients.test_realtime import RESPOND, TEXT_TURN, kinds, say
from tests.clients.test_sockets import QUESTION, Client, asked, text_of
from tests.servers import LiveServer, options, serve

pytestmark = pytest.mark.clients

CLOSE = ("close",)


@pytest.fixture(scope="module")
def litellm_sockets() -> Driver:
    return python_client("litellm", "drive_litellm_sockets", "async")


class Encrypted(NamedTuple):
    """A server with TLS, and the authority that its clients must know."""

    server: LiveServer
    authority: str


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    with serve("--engine", "echo", "--ssl-certfile", str(folder / "server.pem")) as server:
        server.wait_ready()
        yield Encrypted(server, str(folder / "authority.pem"))


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_a_realtime_session_through_litellm(
    litellm_sockets: Driver, echo_server: LiveServer, encrypted: Encrypted, tls: bool
) -> None:
    server, authority = encrypted if tls else (echo_server, None)
    client = Client(litellm_sockets, server, "realtime", certificate=authority)
    assert client.opening[-1]["session"]["type"] == "realtime"
    settings = {"type": "realtime", "output_modalities": ["text"], "instructions": "Be brief.", "max_output_tokens": 6}
    events = client.call(("session.update", {"session": settings}), say(QUESTION), RESPOND, until=["response.done"])
    assert kinds(events) == TEXT_TURN
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(events[-1]["response"])
    assert client.call(("response.cancel", {}), until=["error"])[-1]["error"]["code"] == "response_cancel_not_active"
    assert client.call(say("again"), RESPOND, until=["response.done"])[-1]["response"]["usage"]["output_tokens"] == 6


def test_responses_through_litellm(litellm_sockets: Driver, encrypted: Encrypted) -> None:
    """It puts its own ids in the place of the server's, and must find the server's again."""
    client = Client(litellm_sockets, encrypted.server, "responses", certificate=encrypted.authority)
    first = client.create(max_output_tokens=4)
    assert first["usage"]["output_tokens"] == 4
    second = client.create(input="more", previous_response_id=first["id"], max_output_tokens=4)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    lane = client.call(("response.create", asked("lane", stream_id="a", max_output_tokens=4)))
    assert {event["stream_id"] for event in lane} == {"a"}
    event = client.call(("response.create", asked(previous_response_id="resp_other")))[-1]
    assert (event["status"], event["error"]["code"]) == (400, "previous_response_not_found")


def test_responses_through_litellm_need_encryption(litellm_sockets: Driver, echo_server: LiveServer) -> None:
    """What docs/client.md says about it. With http in its address, litellm does not even connect."""
    before = echo_server.metric("lmi_websockets")
    client = Client(litellm_sockets, echo_server, "responses")
    [event] = client.call(("response.create", asked()), until=[*CLOSE])
    assert (event["code"], "ssl argument is incompatible with a ws:// URI" in event["reason"]) == (1011, True)
    assert echo_server.metric("lmi_websockets") == before


def test_a_refused_handshake_reaches_the_client_of_litellm(litellm_sockets: Driver) -> None:
    with serve("--engine", "echo", *options("option.websockets_max=0")) as server:
        server.wait_ready()
        events: list[Any] = litellm_sockets.generate(server.url, "realtime", until=CLOSE)
    assert "HTTP 426" in events[0]["error"]["message"]
    assert events[-1]["code"] == 1011

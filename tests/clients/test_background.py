"""Background responses of openai's client."""

from __future__ import annotations

import pytest

from tests.clients.driver import Driver, drivers
from tests.servers import serve

pytestmark = pytest.mark.clients

background = drivers("openai", "drive_background")


def test_background_responses_with_openais_client(background: Driver) -> None:
    """They are polled and streamed. After a lost connection the rest is read by number, and by the client's helper."""
    options = ("-o", "option.responses_store=memory", "-o", "option.echo_tokens_per_second=100")
    with serve("--engine", "echo", *options) as server:
        found = background.generate(server.url, "one two")
    assert (found["made"]["status"], found["polled"]["status"]) == ("queued", "completed")
    events = [*found["events"], *found["rest"]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[1]["type"] == "response.queued"
    assert events[-1]["response"]["output"][0]["content"] == found["polled"]["output"][0]["content"]
    assert [event["sequence_number"] for event in found["helped"]] == list(range(4, len(events)))
    assert found["final"]["id"] == events[0]["response"]["id"]
    assert found["final"]["status"] == "completed"
    assert [response["status"] for response in found["cancelled"]] == ["cancelled", "cancelled"]

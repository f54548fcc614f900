"""Background responses in any order of events, on a server that is stopped, killed and started again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.app.server import BY_KEY
from tests.app.test_background import ENDED, PATH, Stream, call, events_in, numbers
from tests.servers import LiveServer, serve, wait_for

pytestmark = pytest.mark.timeout(300)  # it starts some twenty servers
OWNERS = ({"authorization": "Bearer ann"}, {"authorization": "Bearer bob"})
ORDER = ("queued", "in_progress", "ended")
PROMPTS = st.sampled_from(["a b", "a b c d", "a <raise>", "a <die>"])


class Reader(threading.Thread):
    """A client that reads events until they end."""

    def __init__(self, server: LiveServer, response: Response, after: int) -> None:
        super().__init__(daemon=True)
        self.events: list[dict[str, Any]] = []
        self.response, self.after, self.is_broken = response, after, False
        self._server, self._path = server, f"/{response.id}?stream=true&starting_after={after}"
        self.start()

    def run(self) -> None:
        try:
            with Stream(self._server, "GET", self._path, headers=OWNERS[self.response.owner]) as stream:
                self.events += stream
        except httpx.HTTPError:  # the server was killed
            self.is_broken = True


class Response:
    """What is known of a response.

    Attributes:
        ended: its final state, which must not change.
        seen: events that any client has seen, by number.
    """

    def __init__(self, id: str, owner: int, *, streams: bool) -> None:
        self.id, self.owner, self.streams = id, owner, streams
        self.ended: Any = None
        self.seen: dict[int, Any] = {}
        self.rank = 0

    def see(self, events: list[dict[str, Any]], after: int, *, whole: bool) -> None:
        """Check events, which come in order and without gaps, and are those that others have seen."""
        assert numbers(events) == list(range(after + 1, after + 1 + len(events)))
        for event in events:
            assert self.seen.setdefault(event["sequence_number"], event) == event
        if whole and self.seen:
            assert sorted(self.seen) == list(range(len(self.seen))) or after >= 0


class Background(RuleBasedStateMachine):
    """A server, its clients, and what they know of the responses."""

    responses = Bundle("responses")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.all: list[Response] = []
        self.readers: list[Reader] = []
        self.stack = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        options = (
            "echo_tokens_per_second=100",
            "echo_cues=true",
            f"responses_store={self.directory}",
            "background_max=1000",
        )
        flags = [part for option in options for part in ("-o", f"option.{option}")]
        self.server = self.stack.enter_context(serve("--engine", "echo", *BY_KEY, *flags))
        self.server.wait_ready()

    # -- what clients do -------------------------------------------------------------------------------------------

    @rule(
        target=responses,
        prompt=PROMPTS,
        owner=st.sampled_from([0, 1]),
        streams=st.booleans(),
        stores=st.booleans(),
        length=st.sampled_from([2, 30, 3000]),
        summarizes=st.booleans(),
    )
    def create(self, prompt: str, owner: int, streams: bool, stores: bool, length: int, summarizes: bool) -> Any:
        """A request that is summarized first has two passes, between which anything may happen."""
        self.server.wait_ready()  # after the engine's death
        body: dict[str, Any] = {"input": prompt, "max_output_tokens": length, "background": True, "store": stores}
        if summarizes:
            body["input"] = [{"role": role, "content": prompt} for role in ("user", "assistant")]
            body["context_management"] = [{"type": "compaction", "compact_threshold": 1}]
        if streams:
            with Stream(self.server, "POST", json={**body, "stream": True}, headers=OWNERS[owner]) as stream:
                first = next(iter(stream))["response"]
        else:
            first = self.server.post(body, PATH, headers=OWNERS[owner]).json()
        assert first["status"] == "queued"
        response = Response(first["id"], owner, streams=streams)
        self.all.append(response)
        return response

    @rule(response=responses)
    def poll(self, response: Response) -> None:
        found = call(self.server, "GET", response.id, OWNERS[response.owner])
        assert found.status_code == 200, found.text
        value = found.json()
        rank = ORDER.index("ended" if value["status"] in ENDED else value["status"])
        assert rank >= response.rank, "a state never goes back"
        response.rank = rank
        if rank == 2:
            assert response.ended in (None, value), "there is one final state"
            response.ended = value
        assert call(self.server, "GET", response.id, OWNERS[1 - response.owner]).status_code == 404

    @rule(response=responses, after=st.integers(-1, 12))
    def read(self, response: Response, after: int) -> None:
        if response.streams:
            self.readers.append(Reader(self.server, response, after))
        else:
            found = call(self.server, "GET", f"{response.id}?stream=true", OWNERS[response.owner])
            assert found.status_code == 400

    @rule(response=responses)
    def cancel(self, response: Response) -> None:
        assert call(self.server, "POST", f"{response.id}/cancel", OWNERS[1 - response.owner]).status_code == 404
        value = call(self.server, "POST", f"{response.id}/cancel", OWNERS[response.owner]).json()
        assert value["status"] in ENDED
        assert response.ended in (None, value)
        response.ended, response.rank = value, 2

    @rule(response=consumes(responses))
    def delete(self, response: Response) -> None:
        assert call(self.server, "DELETE", response.id, OWNERS[1 - response.owner]).status_code == 404
        assert call(self.server, "DELETE", response.id, OWNERS[response.owner]).status_code == 200
        assert call(self.server, "GET", response.id, OWNERS[response.owner]).status_code == 404
        self.all.remove(response)

    # -- what happens to the server --------------------------------------------------------------------------------

    @rule(number=st.sampled_from([signal.SIGTERM, signal.SIGKILL]))
    def restart(self, number: signal.Signals) -> None:
        """SIGTERM is sent twice, so that nothing waits for the drain."""
        for _ in range(2):
            self.server.send_signal(number)
        self.server.wait(60)
        with contextlib.suppress(AssertionError):
            self.stack.close()
        self.stack = contextlib.ExitStack()
        self.finish_readers()
        self.start()
        for response in self.all:  # nothing is polled for ever
            self.poll(response)
            assert response.ended is not None

    @invariant()
    def ended_readers_have_seen_what_others_have(self) -> None:
        for reader in [reader for reader in self.readers if not reader.is_alive()]:
            self.readers.remove(reader)
            reader.response.see(reader.events, reader.after, whole=not reader.is_broken)

    def finish_readers(self) -> None:
        for reader in self.readers:
            reader.join(30)
            assert not reader.is_alive(), "a reader waits for ever"
        self.ended_readers_have_seen_what_others_have()

    def teardown(self) -> None:
        try:
            for response in self.all:
                self.cancel(response)
            self.finish_readers()
            for response in self.all:
                self.poll(response)
                if response.streams:
                    found = call(self.server, "GET", f"{response.id}?stream=true", OWNERS[response.owner])
                    events = events_in(found.text)
                    response.see(events, -1, whole=True)
                    if response.ended["status"] != "cancelled":
                        assert events[-1]["response"] == response.ended
                    kinds = [event["type"].removeprefix("response.") for event in events]
                    assert sum(kind in ENDED for kind in kinds) == (response.ended["status"] != "cancelled")
            wait_for(lambda: self.server.metric("lmi_active_sequences") == 0, 10, "the engine still runs something")
        finally:
            self.stack.close()
            shutil.rmtree(self.directory, ignore_errors=True)


TestBackground = Background.TestCase
TestBackground.settings = settings(
    max_examples=6, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck)
)

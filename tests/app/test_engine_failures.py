"""Engines that raise, hang, die or are killed. Nobody's tokens are lost or crossed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import httpx
import pytest

from handler.engines.echo.engine import Echo
from tests.app.server import serve, short_drain
from tests.servers import LiveServer, http, wait_for

ECHO = ("--engine", "echo", "-o", "option.echo_cues=true", "-o", "option.echo_tokens_per_second=50")
ISOLATED = ("-o", "option.engine_isolation=process")
ASK = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}


def stream(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", server.url + "/invocations", json={**body, "stream": True}, timeout=60) as found:
        if found.status_code != 200:
            return [json.loads(found.read())]
        return [json.loads(line) for line in found.iter_lines()]


def long(words: str = "x y") -> dict[str, Any]:
    return {"inputs": words, "parameters": {"max_new_tokens": 2000}}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the thread that dies
@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("cue", ["<raise>", "<die>"])
def test_an_engine_that_breaks_ends_those_in_flight_and_serves_again(isolation: str, cue: str) -> None:
    with serve(*ECHO, "-o", f"option.engine_isolation={isolation}") as server:
        with ThreadPoolExecutor(4) as pool:
            neighbours = [pool.submit(stream, server, long(f"n{index}")) for index in range(3)]
            wait_for(lambda: server.metric("lmi_active_sequences") == 3, 5, "the neighbours do not run")
            broken = server.post({"inputs": f"a b {cue}"})
            assert broken.status_code == 424
            assert "engine failure" in broken.json()["error"]
            for index, future in enumerate(neighbours):
                *tokens, last = future.result()
                assert {line["token"]["text"] for line in tokens} == {f" n{index}"}
                assert last["details"]["finish_reason"] == "error"
                assert "engine failure" in last["error"]
        server.wait_ready(20)
        assert server.post(ASK).json() == {"generated_text": " a b a"}
        assert server.metric("lmi_engine_restarts_total") == 1
        assert server.metric("lmi_active_sequences") == 0


@pytest.mark.parametrize("place", ["add", "step"])
def test_an_engines_own_words_are_for_the_log(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    said = "CUDA error in /opt/ml/model/a.cu at http://10.1.2.3:80/x with sk-0123456789abcdef"

    def fail(*arguments: object) -> NoReturn:
        raise ValueError(said)

    with serve(*ECHO, "-o", "option.engine_isolation=thread") as server:
        with monkeypatch.context() as patch:
            patch.setattr(Echo, place, fail)
            error = server.post(ASK).json()["error"]
            assert "CUDA error in [path] at [address] with [key]" in error
            if place == "step":
                assert "CUDA error in [path] at [address] with [key]" in http.get(server.url + "/ping").json()["reason"]
        server.wait_ready(10)
        assert server.post(ASK).status_code == 200
        assert "ValueError: CUDA error in /opt/ml/model/a.cu at http://10.1.2.3:80/x with [key]" in server.log


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_hung_engine_is_replaced_and_waiting_requests_are_served(isolation: str) -> None:
    options = (
        "-o",
        f"option.engine_isolation={isolation}",
        "-o",
        "option.engine_timeout=1",
        "-o",
        "option.max_rolling_batch_size=1",
    )
    with serve(*ECHO, *options) as server, ThreadPoolExecutor(3) as pool:
        hung = pool.submit(server.post, {"inputs": "a <hang>"})
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        waiting = [pool.submit(server.post, ASK) for _ in range(2)]
        wait_for(lambda: server.ping() == 503, 10, "the ping still says 200")
        assert "no step for 1 s" in hung.result().json()["error"]
        assert [future.result().json() for future in waiting] == [{"generated_text": " a b a"}] * 2
        assert server.ping() == 200


def test_a_refusal_by_the_engine_ends_one_request_only() -> None:
    with serve(*ECHO) as server:
        found = server.post({"inputs": "a <refuse>"})
        assert (found.status_code, "refused on cue" in found.json()["error"]) == (424, True)
        assert server.metric("lmi_engine_restarts_total") == 0


def test_cues_are_only_words_unless_switched_on(echo_server: LiveServer) -> None:
    assert echo_server.post({"inputs": "<die> <raise>"}).json()["generated_text"].startswith(" <die> <raise>")


def test_ping_says_503_and_why_while_there_is_no_engine() -> None:
    with serve(*ECHO, *ISOLATED) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        found = http.get(server.url + "/ping").json()
        assert (found["status"], found["state"]) == ("Unhealthy", "restarting")
        assert "signal 9" in found["reason"]
        server.wait_ready(10)


def test_a_hung_engine_is_noticed_though_every_client_gives_up_first() -> None:
    with serve(*ECHO, *ISOLATED, "-o", "option.engine_timeout=2") as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)

        def give_up_and_look() -> bool:
            with contextlib.suppress(httpx.ReadTimeout):
                http.post(server.url + "/invocations", json=ASK, timeout=0.4)
            return server.ping() == 503

        wait_for(give_up_and_look, 15, "nobody noticed")
        server.wait_ready(10)
        assert server.post(ASK).status_code == 200


def test_a_stream_that_outlives_the_drain_ends_with_an_error_line() -> None:
    with short_drain(0.3), serve(*ECHO) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, {"inputs": "a b", "parameters": {"max_new_tokens": 100_000}})
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        assert server.stop() == 0
        assert "the server stopped" in running.result()[-1]["error"]


def test_echo_streams_never_cross_under_aborts(echo_server: LiveServer) -> None:
    """Many more rounds than a model allows: every word of an answer is the asker's own."""
    failures: list[str] = []

    def client(name: int) -> None:
        for round in range(10):
            word = f"w{name}-{round}"
            body = {"inputs": word, "stream": True, "parameters": {"max_new_tokens": 40}}
            with http.stream("POST", echo_server.url + "/invocations", json=body, timeout=60) as found:
                for count, line in enumerate(found.iter_lines()):
                    if json.loads(line)["token"]["text"] != f" {word}":
                        failures.append(line)
                    if (name + round) % 3 == 0 and count == 7:
                        break

    threads = [threading.Thread(target=client, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    wait_for(lambda: echo_server.metric("lmi_active_sequences") == 0, 10, "aborted streams still run")

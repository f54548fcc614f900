"""Engines that raise, hang, die or are killed; servers that are stopped. Nobody's tokens are lost or crossed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers import LiveServer, http, serve, wait_for

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


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_hung_engine_is_replaced_and_those_who_wait_are_served_afterwards(isolation: str) -> None:
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


@pytest.mark.model
def test_a_killed_engine_under_sixteen_streams(demo_model: Path) -> None:
    """Every client gets its own tokens up to the kill and an error line; those who wait are served afterwards."""
    with serve(str(demo_model), "-o", "option.max_rolling_batch_size=16") as server:
        prompts = [f"Count from {index}: {index}," for index in range(16)]
        body = {"parameters": {"max_new_tokens": 400, "ignore_eos_token": True}}
        alone = [stream(server, {"inputs": prompts[index], "parameters": {"max_new_tokens": 12}}) for index in (0, 7)]
        with ThreadPoolExecutor(20) as pool:
            streams = [pool.submit(stream, server, {**body, "inputs": prompt}) for prompt in prompts]
            wait_for(lambda: server.metric("lmi_active_sequences") == 16, 10, "they do not run")
            begun = server.metric("lmi_generated_tokens_total")  # the first ones' may be most of them
            wait_for(lambda: server.metric("lmi_generated_tokens_total") > begun + 16 * 14, 30, "no tokens")
            waiting = [pool.submit(server.post, {"inputs": "The capital of France is"}) for _ in range(2)]
            wait_for(lambda: server.metric("lmi_queued_requests") == 2, 5, "nobody waits")
            os.kill(server.engine_pid(), signal.SIGKILL)
            for future in streams:
                *tokens, last = future.result()
                assert len(tokens) >= 10
                assert (last["code"], last["details"]["finish_reason"]) == (424, "error")
                assert "signal 9" in last["error"]
            for index, expected in zip((0, 7), alone, strict=True):
                lines = streams[index].result()
                assert [line["token"]["id"] for line in lines[:10]] == [line["token"]["id"] for line in expected[:10]]
            assert ["Paris" in future.result().json()["generated_text"] for future in waiting] == [True, True]
        assert server.ping() == 200
        assert server.metric("lmi_engine_restarts_total") == 1


def test_an_engine_process_ends_with_its_server() -> None:
    with serve(*ECHO, *ISOLATED) as server:
        pid = server.engine_pid()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 5, "the engine outlives its server")


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


# -- stopping ----------------------------------------------------------------------------------------------------


def test_sigterm_lets_streams_finish_refuses_new_work_and_exits_0() -> None:
    with serve(*ECHO) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, server, {"inputs": "a b", "parameters": {"max_new_tokens": 75}})
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        refused = server.post(ASK)
        assert (refused.status_code, "stopping" in refused.json()["message"]) == (503, True)
        assert len(running.result()) == 75
        assert server.stop() == 0


def test_a_request_whose_body_is_under_way_at_sigterm_is_told() -> None:
    data = json.dumps(ASK).encode()
    with serve(*ECHO) as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:5]
        )
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        connection.sendall(data[5:])
        assert b"503" in connection.recv(4096).split(b"\r\n")[0]
        assert server.stop() == 0


def test_a_stream_that_outlives_the_drain_ends_with_an_error_line() -> None:
    with serve(*ECHO) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, {"inputs": "a b", "parameters": {"max_new_tokens": 100_000}})
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 28
        assert "the server stopped" in running.result()[-1]["error"]


@pytest.mark.parametrize("seconds", [0.3, 0.8])
def test_sigterm_before_it_serves_exits_0_as_well(demo_model: Path, seconds: float) -> None:
    process = subprocess.Popen([sys.executable, "-m", "handler", "serve", str(demo_model), "--port", "0"])
    time.sleep(seconds + 0.4)  # python itself takes its time to start
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_sigterm_when_idle_exits_0_at_once() -> None:
    with serve(*ECHO) as server:
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 5


def test_a_second_signal_does_not_wait() -> None:
    with serve(*ECHO) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, long())
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 8
        assert "the server stopped" in running.result()[-1]["error"]


# -- starts that are refused ---------------------------------------------------------------------------------------


def refused_start(*arguments: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "handler", "serve", "--port", "0", *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr.splitlines()[-1]
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("/no/such/model",), "there is no model at '/no/such/model'"),
        (("-o", "option.tgi_compt=true"), "did you mean 'option.tgi_compat'"),
        (("--engine", "vllm"), "pip install vllm"),
        (("--engine", "warp"), "--engine warp: must be one of auto, openvino"),
        (("--port", "99999"), "must be a number from 0 to 65535"),
        (("--host", "203.0.113.1", "--engine", "echo"), "cannot listen on 203.0.113.1"),
    ],
)
def test_a_start_that_cannot_work_says_what_to_change(arguments: tuple[str, ...], wanted: str) -> None:
    assert wanted in refused_start(*arguments)


def test_a_taken_port_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-m", "handler", "serve", "--port", str(taken.getsockname()[1])],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert "cannot listen" in done.stderr


@pytest.mark.parametrize("content", [b"GGUF but not really", b""])
def test_a_broken_model_file_is_refused_with_the_reason(tmp_path: Path, content: bytes) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(content)
    assert "broken.gguf" in refused_start(str(model))


@pytest.mark.model
def test_a_model_file_that_is_cut_short_is_refused(demo_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "short.gguf"
    with demo_model.open("rb") as whole:
        model.write_bytes(whole.read(30_000_000))
    assert "is cut short: it holds 30,000,000 bytes" in refused_start(str(model))


def test_the_model_directorys_own_properties_are_read_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.llm_engine=echo\noption.model_name=mine\n")
    for arguments, env in (((str(tmp_path),), {}), ((), {"HF_MODEL_ID": str(tmp_path)})):
        with serve(*arguments, env=env) as server:
            assert server.post(ASK, "/predictions/mine").status_code == 200


# -- company -------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_thirty_two_streams_with_random_aborts_equal_the_same_requests_alone(demo_model: Path) -> None:
    """No token crosses: each stream that was not aborted is what the request gives by itself.

    In fp32, where a model's arithmetic does not depend on what else is in the batch.
    """
    with serve(str(demo_model), "-o", "option.dtype=fp32") as server:
        _check_thirty_two_streams(server)


def _check_thirty_two_streams(model_server: LiveServer) -> None:
    import random

    dice = random.Random(7)
    bodies = []
    for index in range(32):
        sampled = {"do_sample": True, "seed": index, "temperature": 0.8, "top_k": 40} if index % 2 else {}
        bodies.append({"inputs": f"Story number {index}: once", "parameters": {"max_new_tokens": 24, **sampled}})
    aborted = set(dice.sample(range(32), 10))

    def run(index: int) -> list[int] | None:
        time.sleep(dice.random() / 4)
        body = {**bodies[index], "stream": True}
        with http.stream("POST", model_server.url + "/invocations", json=body, timeout=60) as found:
            ids = []
            for line in found.iter_lines():
                ids.append(json.loads(line)["token"]["id"])
                if index in aborted and len(ids) == 5 + index % 7:
                    return None
            return ids

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(run, range(32)))
    aborted_only = [index for index in range(32) if together[index] is None]
    assert set(aborted_only) <= aborted
    assert aborted_only
    wait_for(lambda: model_server.metric("lmi_active_sequences") == 0, 10, "aborted streams still run")
    differing = []
    for index, ids in enumerate(together):
        if ids is not None and ids != [line["token"]["id"] for line in stream(model_server, bodies[index])]:
            differing.append(index)
    assert differing == []


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

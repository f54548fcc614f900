"""Servers that are stopped or killed: every one ends, whatever it is doing."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.server import serve as serve_here
from tests.app.test_engine_failures import ASK, ECHO, ISOLATED, long, stream
from tests.app.test_formatters import BAD, ask
from tests.servers import PATIENCE, LiveServer, http, serve, wait_for
from tests.user_files import write_model

# -- stop signals ------------------------------------------------------------------------------------------------------
# SIGTERM and SIGINT at moments at which a handler may do nothing but note them: every server stops, with status 0.


def signalling(name: str, text: str) -> tuple[str, ...]:
    return ("-m", "tests.process.http.signalling", name, text)


def ended(server: LiveServer, seconds: float = PATIENCE) -> int:
    """The exit status of a server that nobody signals but itself."""
    return server.wait(seconds)


def request(words: str, num_tokens: int) -> dict[str, Any]:
    return {"inputs": words, "parameters": {"max_new_tokens": num_tokens}}


# The log line of the answered request is the write in whose middle the signal comes.
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_in_the_middle_of_a_log_write_at_rest_is_heard(name: str) -> None:
    with serve(*ECHO, program=signalling(name, "outcome=")) as server:
        assert server.post(request("a b", 1)).status_code == 200
        assert ended(server) == 0
    assert f"{name}: stopping" in server.log
    assert "reentrant" not in server.log


def test_at_rest_nothing_is_said_of_answers_to_finish() -> None:
    with serve(*ECHO) as server:
        server.send_signal(signal.SIGTERM)
        assert ended(server) == 0
    assert server.log.endswith("SIGTERM: stopping\n")
    times = re.search(r"ready after (\S+) s \(files (\S+) s, engine (\S+) s\): echo ", server.log)
    assert times is not None
    whole, files, engine = map(float, times.groups())
    assert whole == pytest.approx(files + engine, abs=0.16)  # each is rounded


def test_a_signal_in_the_middle_of_a_log_write_under_load_fails_nobody() -> None:
    with serve(*ECHO, program=signalling("SIGTERM", "id=first ")) as server, ThreadPoolExecutor(9) as pool:
        running = [pool.submit(stream, server, request(f"n{index}", 50)) for index in range(8)]
        wait_for(lambda: server.metric("lmi_time_to_first_token_seconds_count") == 8, 10, "they do not run")
        first = pool.submit(server.post, request("a b", 1), headers={"x-request-id": "first"})
        for index, future in enumerate(running):
            lines = future.result()
            assert [line["token"]["text"] for line in lines] == [f" n{index}"] * 50
            assert "error" not in lines[-1]
        assert first.result().status_code == 200
        assert ended(server) == 0
    assert "SIGTERM: stopping; responses to finish:" in server.log


@pytest.mark.parametrize("text", ["starting echo", "ready after", "listening on"])
def test_a_signal_in_the_middle_of_a_start_up_message_is_heard(text: str) -> None:
    command = [sys.executable, *signalling("SIGTERM", text), "serve", "--port", "0", *ECHO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_says_what_it_waits_for_and_what_a_second_one_does() -> None:
    with serve(*ECHO) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, request("a b", 2000))
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "SIGINT: stopping" in server.log, 5, "it says nothing")
        line = next(line for line in server.log.splitlines() if "SIGINT: stopping" in line)
        assert "responses to finish: 1, within 20 s" in line
        assert "a second Ctrl-C ends them at once" in line
        server.process.send_signal(signal.SIGINT)
        assert ended(server, 15) == 0  # the stream would take 40 s, and had 20
        assert "the server stopped" in running.result()[-1]["error"]


def test_a_signal_from_before_python_started_is_heard() -> None:
    """As the container starts it: blocked, until there are handlers."""
    command = ["/bin/sh", "-c", 'kill -TERM $$; exec "$@"', "sh", sys.executable, "-m", "handler", "serve", *ECHO]
    block = "import os, signal as s, sys; s.pthread_sigmask(s.SIG_BLOCK, {15}); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", block, *command], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_signal_before_the_event_loop_raises_and_is_kept(name: str, status: int) -> None:
    code = f"""
import signal, sys
from handler.core.loop import StopSignals
signals = StopSignals()
signals.install()
class Swallows:
    def __del__(self):
        signal.raise_signal(signal.{name})
sys.unraisablehook = lambda _: None
Swallows()  # what is raised here reaches nobody
print(*signals.received, flush=True)
signal.raise_signal(signal.{name})  # a second one does not rely on it
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (status, f"{signal.Signals[name].value}\n")


# orjson's extension imports it while it initializes, and reads what it has got.
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
@pytest.mark.parametrize("imported", ["uuid", "dataclasses", "enum"])
def test_a_signal_during_an_extension_modules_import_crashes_nothing(imported: str, name: str, status: int) -> None:
    code = f"""
import signal, sys
from handler.core.loop import StopSignals
StopSignals().install()
class Signals:
    def find_spec(self, module, path, target=None):
        if module == {imported!r}:
            signal.raise_signal(signal.{name})
sys.meta_path.insert(0, Signals())
sys.modules.pop({imported!r}, None)
assert "orjson" not in sys.modules
import orjson
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")


def test_the_event_loop_is_told_each_signal_once_also_of_earlier_ones() -> None:
    code = """
import asyncio, signal, sys
from handler.core.loop import StopSignals
signals = StopSignals()
signals.install()
try:
    signal.raise_signal(signal.SIGTERM)
except SystemExit as error:
    assert error.code == 0
async def main():
    heard = []
    signals.listen(heard.append)
    assert heard == [signal.SIGTERM]
    signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGTERM], "a handler must not call it"
    await asyncio.sleep(0.1)
    assert heard == [signal.SIGTERM, signal.SIGINT]
    signals.leave()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# -- servers that are stopped or killed: processes where their end or the signal itself is what is tested --------------


def test_an_engine_process_ends_with_its_server() -> None:
    with serve(*ECHO, *ISOLATED) as server:
        pid = server.engine_pid()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 5, "the engine outlives its server")


def test_sigterm_lets_streams_finish_refuses_new_work_and_exits_0() -> None:
    with serve_here(*ECHO) as server, ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream, server, {"inputs": "a b", "parameters": {"max_new_tokens": 250}})
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        refused = server.post(ASK)
        assert (refused.status_code, "stopping" in refused.json()["message"]) == (503, True)
        assert len(running.result()) == 250
        assert server.stop() == 0


def test_a_request_whose_body_is_under_way_at_sigterm_is_told() -> None:
    data = json.dumps(ASK).encode()
    with (
        serve_here(*ECHO) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
    ):
        head = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(data))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")  # it waits for the body
        connection.sendall(data[:5])
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        connection.sendall(data[5:])
        assert b"503" in connection.recv(4096).split(b"\r\n")[0]
        assert server.stop() == 0


@pytest.mark.parametrize("path", ["/invocations", "/adapters"])
def test_a_request_whose_body_never_comes_is_told_at_the_end(path: str) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc" % path.encode()
    adapters = ("-o", "option.enable_lora=true")
    with (
        serve_here(*ECHO, *adapters) as server,
        socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection,
    ):
        connection.sendall(head)
        server.ping()  # it has read the head
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ended or "SIGTERM" in server.log, 5, "it does not hear the signal")
        server.send_signal(signal.SIGTERM)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the server is stopping" in answer
        assert server.wait(15) == 0
        assert "Traceback" not in server.log


@pytest.mark.model
def test_sigterm_before_it_serves_exits_0_as_well(demo_model: Path) -> None:
    command = [sys.executable, "-m", "handler", "serve", str(demo_model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_sigterm_when_idle_exits_0_at_once() -> None:
    with serve(*ECHO) as server:
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 0  # answers under way would have had 20 seconds


def test_a_second_signal_does_not_wait() -> None:
    with serve(*ECHO) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, long())
        wait_for(lambda: server.metric("lmi_active_sequences") == 1, 5, "it does not run")
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.ping() == 503, 5, "the ping still says 200")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(15) == 0  # the stream would take 40 s, and had 20
        assert "the server stopped" in running.result()[-1]["error"]


# -- formatters --------------------------------------------------------------------------------------------------------
# A formatter that hangs does not hold up the process's end; the start's example leaves the body to a formatter.


def test_a_hung_formatter_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with serve("--engine", "echo", "--properties", str(write_model(tmp_path, BAD))) as server:
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + "/invocations", json=ask("a", bad_input="sleep600"), timeout=0.5)
        server.send_signal(signal.SIGTERM)
        hint = "-d @body.json  # in the format that the input formatter 'read' of model.py reads\n"
        wait_for(lambda: hint in server.log, 5, "its example is another body")
        wait_for(lambda: "SIGTERM: stopping" in server.log, 5, "it does not hear the signal")
        server.send_signal(signal.SIGTERM)  # the second signal does not wait for what is under way
        assert server.wait(8) == 0  # before the formatter's ten seconds are up

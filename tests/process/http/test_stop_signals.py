"""SIGTERM and SIGINT at moments at which a handler may do nothing but note them: every server stops, with status 0."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.app.test_engine_failures import ECHO, stream
from tests.servers import PATIENCE, LiveServer, serve, wait_for


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
    assert "SIGTERM: stopping; answers to finish:" in server.log


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
        assert "answers to finish: 1, within 20 s" in line
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
from handler.http.stop_signals import StopSignals
signals = StopSignals()
signals.install()
class Swallows:
    def __del__(self):
        signal.raise_signal(signal.{name})
sys.unraisablehook = lambda _: None
Swallows()  # what is raised here reaches nobody
assert signals.received == [signal.{name}]
signal.raise_signal(signal.{name})  # a second one does not rely on it
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == status


# orjson's extension imports it while it initializes, and reads what it has got.
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
@pytest.mark.parametrize("imported", ["uuid", "dataclasses", "enum"])
def test_a_signal_during_an_extension_modules_import_crashes_nothing(imported: str, name: str, status: int) -> None:
    code = f"""
import signal, sys
from handler.http.stop_signals import StopSignals
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
from handler.http.stop_signals import StopSignals
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

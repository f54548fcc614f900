"""Large bodies are read by a process of their own, which holds up neither the server nor its end."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from handler.serving.turns import MAX_VALUES
from tests.app.http.test_large_bodies import MIB, send
from tests.process_tree import descendants
from tests.servers import ServerProcess, serve, wait_for


def computed(pid: int) -> float:
    """Seconds that a process has computed, its children's aside."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def test_the_servers_process_does_not_parse_large_bodies_and_keeps_nothing_of_them() -> None:
    """What it computes, it computes while it holds the GIL."""
    keys = b'{"inputs":"a"' + b"".join(b',"%06x":1' % number for number in range(400_000)) + b"}"
    with serve("--engine", "echo") as server:
        server.wait_ready()
        pid = server.process.pid
        send(server, keys)
        before, memory = computed(pid), resident(pid)
        for _ in range(3):
            found = send(server, keys)
            assert (found.status_code, found.json()["message"]) == (
                413,
                f"the body holds more than {MAX_VALUES} texts, names, lists and objects",
            )
        assert computed(pid) - before < 0.5, "to parse all of them takes more than a second"
        assert resident(pid) - memory < 24, "each of them has 5 MiB, and a hundred when it is parsed"
        assert server.post({"inputs": "a"}).status_code == 200


def test_the_process_ends_with_its_server() -> None:
    with serve("--engine", "echo") as server:
        server.wait_ready()
        assert send(server, b'{"inputs":"' + b"a" * MIB + b'"}').status_code == 200
        pids = [reader_pid(server)]
        server.process.kill()
        server.process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids), 10, "it lives on")


def test_a_large_body_that_is_being_read_at_sigterm_is_answered() -> None:
    body = b'{"inputs":"' + b"a" * MIB + b'"}'
    with serve("--engine", "echo") as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        assert send(server, body).status_code == 200
        reader = reader_pid(server)
        os.kill(reader, signal.SIGSTOP)
        try:
            reading = pool.submit(send, server, body)
            time.sleep(0.5)  # the body has come whole
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "answers to finish: 1" in server.log, 10, "it is not counted")
        finally:
            os.kill(reader, signal.SIGCONT)
        assert reading.result().status_code == 200
        assert server.process.wait(10) == 0


def reader_pid(server: ServerProcess) -> int:
    """The process that reads large bodies."""
    readers = [pid for pid, command in descendants(server.process.pid).items() if "loop_watcher" not in command]
    (pid,) = readers  # echo has no process of its own
    return pid

"""The lines of llama-server's log: which are logged, and which tell why it ended."""

from __future__ import annotations

import pytest

from handler.engines.llamacpp import child
from tests.one_test import in_one_test


def test_warnings_about_requests_are_not_logged() -> None:
    quiet, verbose = child.ServerLog(), child.ServerLog(is_verbose=True)
    response = "E srv    send_error: task id = 0, error: input (513 tokens) is too large to process"
    lines = "W slot operator(): id 6", "I srv update: idle", "E srv send: broken", "E srv send: twice"
    logged = []
    for log in (quiet, verbose):
        log.end_start()
        logged += [text for line in (response, *lines) if (text := log.read(line))]
        assert log.error == "srv send: broken"
    assert logged == [
        *("ERROR llama-server: srv send: broken", "ERROR llama-server: srv send: twice"),
        "DEBUG llama-server: srv send_error: task id = 0, error: input (513 tokens) is too large to process",
        *("WARNING llama-server: slot operator(): id 6", "INFO llama-server: srv update: idle"),
        *("ERROR llama-server: srv send: broken", "ERROR llama-server: srv send: twice"),
    ]


def test_the_first_error_of_a_start_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = child.ServerLog(), [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for line in ("E first", "W warning", "E second"):
        log.read(line)
        clock[0] += 300
    assert log.error == "first"
    log.end_start()
    assert log.error == "", "the server has started in spite of it"


def test_only_recent_errors_are_the_reason_of_a_later_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = child.ServerLog(), [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    log.read("E of the start")
    log.end_start()
    clock[0] += 0.5
    log.read("E of a request")
    clock[0] += 11
    assert log.error == "", "the request has long ended"
    for line in ("E CUDA error: out of memory", "W a warning", "ggml.c:1: GGML_ASSERT(x) failed"):
        log.read(line)
        clock[0] += 0.5
    clock[0] += 5  # it writes the stack
    assert log.error == "CUDA error: out of memory", "the first error names the cause"
    for _ in range(100):
        log.read("E of many requests")
        clock[0] += 0.9
    log.read("E of the last request")
    assert log.error == "of many requests"
    clock[0] += 1.1
    log.read("E the reason")
    assert log.error == "the reason"
    clock[0] += 11
    assert log.error == ""


def test_errors_without_a_pause_have_several_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = child.ServerLog(), [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    log.end_start()
    for number in range(100):
        log.read(f"E {number}")
        clock[0] += 0.5
    assert 78 <= int(log.error) <= 99


@in_one_test(
    ("line", "is_error"),
    [
        (
            "/bin/llama-server: error while loading shared libraries: libllama.so.0: cannot open shared object file",
            True,
        ),
        ("/bin/llama-server: /lib/libc.so.6: version `GLIBC_2.38' not found (required by /bin/llama-server)", True),
        ("usage: llama-cpp-server [-h] [-m MODEL]", False),
        ("llama-cpp-server: error: unrecognized arguments: -t", True),
        ("error: invalid argument: --treads", True),
        ("the chat template raises an error", False),
    ],
)
def test_lines_without_a_level_tell_why_the_program_does_not_start(line: str, is_error: bool) -> None:
    log = child.ServerLog()
    log.read(line)
    assert log.error == (line if is_error else "")

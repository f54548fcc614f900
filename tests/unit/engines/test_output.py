"""The output of child processes: its lines, and the error that may be the reason of an end."""

from __future__ import annotations

import os

import pytest

from handler.engines.base import engine_failure
from handler.engines.process.output import ChildOutput, LastError, LineSplitter
from tests.one_test import in_one_test

VLLM = "(EngineCore pid=7) ERROR 11-30 20:39:15 [core.py:1110] "


@in_one_test(
    ("line", "error"),
    [
        (
            f"{VLLM}torch.AcceleratorError: CUDA error: illegal",
            "torch.AcceleratorError: CUDA error: illegal",
        ),
        (f"\x1b[0;36m{VLLM[:19]}\x1b[0;0m{VLLM[19:]}AssertionError", "AssertionError"),
        ("[rank0]: ValueError: no", "ValueError: no"),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        ("  what():  a shape does not fit", "what(): a shape does not fit"),
        ("python: gemm.cpp:7: run: Assertion `n > 0' failed.", "python: gemm.cpp:7: run: Assertion `n > 0' failed."),
        (f"ValueError: {'long ' * 1000}", f"ValueError: {'long ' * 1000}"[:400]),
        ("(EngineCore pid=7) INFO 11-30 20:39:15 [core.py:1] ValueError: handled", ""),
        ("python: Error while finding module 'x' (No module)", "python: Error while finding module 'x' (No module)"),
        ("INFO: Aborted request 7 after an Error: none", ""),
        (f"{VLLM}Traceback (most recent call last):", ""),
        (f"{VLLM}    raise ValueError('no')", ""),
        ("A" * 4000 + "Error", ""),
    ],
)
def test_the_last_line_of_a_traceback_is_an_error(line: str, error: str) -> None:
    found = LastError()
    assert found.read(line) == line
    assert found.error == error


@in_one_test(
    ("lines", "error"),
    [
        (["ValueError: the cause", "RuntimeError: the effect"], "ValueError: the cause"),
        (["terminate called after throwing 'x'", "  what():  the cause"], "what(): the cause"),
        (["RuntimeError: See root cause above.", "ValueError: the cause"], "ValueError: the cause"),
        (["ValueError: of a request", 11.0, "OSError: See stack trace"], "OSError: See stack trace"),
        (["ValueError: of a request", 2.0, "OSError: the cause"], "OSError: the cause"),
        (["ValueError: the cause", 9.0, "OSError: See stack trace", 9.0], "ValueError: the cause"),
        (["ValueError: of a request", 11.0], ""),
    ],
)
def test_the_first_recent_error_is_the_reason_unless_it_is_vague(lines: list[str | float], error: str) -> None:
    clock = [1000.0]
    with pytest.MonkeyPatch.context() as context:
        context.setattr("time.monotonic", lambda: clock[0])
        found = LastError()
        for line in lines:
            if isinstance(line, str):
                found.read(line)
            else:
                clock[0] += line
        assert found.error == error


@in_one_test(
    ("reason", "message"),
    [
        ("it exited with code 1: ValueError: no /srv/a.bin", "engine failure: it exited with code 1: no [path]"),
        ("it exited with code 1: AssertionError", "engine failure: it exited with code 1"),
    ],
)
def test_a_client_sees_no_names_of_exceptions_and_no_paths(reason: str, message: str) -> None:
    assert engine_failure(reason).message == message
    assert engine_failure(reason).detail == reason


def test_keys_are_masked() -> None:
    found = LastError("a-secret-word")
    found.read("ValueError: a-secret-word")
    assert found.error.startswith("ValueError: ")
    assert "a-secret-word" not in found.error


def test_lines_are_the_same_wherever_the_output_is_cut() -> None:
    output = b"one\n\n  two \r\nthr\xff\xc3\xa9e\r" + b"x" * 5000 + b"\nlast"
    whole = ["one", "two", "thr\ufffd\u00e9e", "x" * 4096 + " ...", "last"]
    for cut in range(len(output) + 1):
        lines = LineSplitter()
        assert [*lines.feed(output[:cut]), *lines.feed(output[cut:]), *lines.end()] == whole
    lines = LineSplitter()
    found = [line for byte in output for line in lines.feed(bytes([byte]))]
    assert found + lines.end() == whole


class Collected(ChildOutput):
    """Keeps what is read from all pipes."""

    def take(self, pipe: int, data: bytes, lines: list[str]) -> None:
        texts = vars(self).setdefault("texts", {})
        texts.setdefault(pipe, []).extend(lines)


def test_what_was_written_before_a_call_has_been_read_after_it() -> None:
    pairs = [os.pipe() for _ in range(2)]
    found = Collected(*(os.fdopen(read, "rb") for read, _ in pairs))
    for number in range(300):
        read, write = pairs[number % 2]
        os.write(write, b"line %d\n" % number)
        if number % 7 == 0:
            found.read(60)
            assert vars(found)["texts"][read] == [f"line {other}" for other in range(number % 2, number + 1, 2)]
    for _, write in pairs:
        os.close(write)

"""The log as JSON: records, what libraries and child processes write, and what DJL Serving makes of both."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from typing import Any

import pytest

from handler.core.errors import ConfigError
from handler.core.log import TEXT, JsonFormatter, TextFormatter, of_request, set_up, wants_json

STORY = """
import logging, os, subprocess, sys
from handler.core import log
from handler.core.errors import ConfigError
log.set_up({"LMI_LOG_FORMAT": "json"})
with log.captured():
    exec(sys.argv[1])
"""


def run(code: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Run code in a process whose output is captured; return the objects on stdout and on stderr, and its status."""
    ended = subprocess.run([sys.executable, "-c", STORY, code], capture_output=True, text=True)
    out, err = ([json.loads(line) for line in text.splitlines()] for text in (ended.stdout, ended.stderr))
    return out, err, ended.returncode


def brief(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["level"], line["message"]) for line in lines]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"LMI_LOG_FORMAT": "JSON"}, True),
        ({"JSON_OUTPUT": "true"}, True),
        ({"JSON_OUTPUT": "false"}, False),
        ({"LMI_LOG_FORMAT": "text", "JSON_OUTPUT": "true"}, False),
    ],
)
def test_the_environment_asks_for_it(environ: dict[str, str], expected: bool) -> None:
    assert wants_json(environ) is expected


def test_wrong_values_are_told_together() -> None:
    with pytest.raises(ConfigError) as refused:
        set_up({"LMI_LOG_FORMAT": "yaml", "LMI_LOG_LEVEL": "loud"})
    assert [problem.message for problem in refused.value.problems] == [
        "environment variable LMI_LOG_FORMAT=yaml: must be text or json",
        "environment variable LMI_LOG_LEVEL=LOUD: must be debug, info, warning or error",
    ]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_constant_that_is_not_json_is_text(constant: str) -> None:
    """Of a child's line, and of a record's field."""
    line = f'{{"loss": {constant}}}'
    out, err, _ = run(f"print('{line}'); logging.error('a', extra={{'fields': {{'loss': float('{constant}')}}}})")
    assert [one["message"] for one in out + err] == [line, "a"]
    assert float(err[0]["loss"]) == pytest.approx(float(constant), nan_ok=True)
    assert isinstance(err[0]["loss"], str)


def test_a_record_has_its_time_and_its_fields() -> None:
    record = logging.LogRecord("handler.x", logging.WARNING, "x.py", 1, "a %s\n\u2028é\udc80", ("b",), None)
    record.created = 1.5
    record.__dict__.update(of_request("r-1"))
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "WARNING",
        "logger": "handler.x",
        "message": "a b\n\u2028é\udc80",
        "request_id": "r-1",
    }


def test_text_is_that_of_the_standard_library() -> None:
    ours, theirs = TextFormatter(TEXT), logging.Formatter(TEXT)
    for created in (0.0, 1.5, 1.75, 1.9999, 2.0, 1700000000.123, 1.0):
        record = logging.LogRecord("handler.x", logging.WARNING, "x.py", 1, "a %s", ("b",), None)
        record.created, record.msecs = created, created % 1 * 1000
        assert ours.format(record) == theirs.format(record)


def test_a_frequent_line_is_that_of_a_record() -> None:
    """With and without a record, which a handler or a filter of someone else needs."""
    code = """
import logging, sys
from handler.core import log
log.set_up({})
logger = logging.getLogger("handler.x")
class Other(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), record.levelno, record.fields)
def write():
    log.log_frequent(logger, "%s of %d\\u2028", ("a", 3), lambda: {"b": 4})
logger.info("%s of %d\\u2028", "a", 3)
write()
other = Other()
logger.addHandler(other)
write()
logger.removeHandler(other)
logger.addFilter(lambda record: False)
write()
logger.filters.clear()
logging.getLogger().handlers[0].setLevel("ERROR")
write()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    lines = ended.stderr.split("\n")
    assert [line[24:] for line in lines] == [r"INFO handler.x a of 3\u2028"] * 3 + [""]
    assert all(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S") and line[19] == "," for line in lines[:-1])
    assert ended.stdout == "a of 3\u2028 20 {'b': 4}\n"


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("write", ["log.log_frequent(logger, 'a %d', (1,), dict)", "logger.info('a %d', 1)"])
def test_a_line_whose_flush_fails_is_written_once(form: str, write: str) -> None:
    """A pipe that is full for a moment, and not blocking, leaves the line in the stream's buffer."""
    code = f"""
import fcntl, logging, os, sys
from handler.core import log
receiver, sender = os.pipe()
os.set_blocking(sender, False)
size = fcntl.fcntl(sender, fcntl.F_GETPIPE_SZ)
log.set_up({{"LMI_LOG_FORMAT": "{form}"}})
logger = logging.getLogger("handler.x")
logging.getLogger().handlers[0].setStream(os.fdopen(sender, "w", 1))
os.write(sender, b"-" * size)
{write}
assert os.read(receiver, size) == b"-" * size
logger.info("the end")
print(os.read(receiver, size).decode())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr == ""
    assert [line.count("a 1") for line in ended.stdout.splitlines() if line.strip()] == [1, 0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_is_written_before_the_process_can_be_killed(form: str) -> None:
    code = """
import logging, os, signal, sys
from handler.core import log
log.set_up({"LMI_LOG_FORMAT": sys.argv[1]})
for number in range(3):
    logging.getLogger("handler").info("line %d", number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, form], capture_output=True, text=True)
    assert [f"line {number}" in line for number, line in enumerate(ended.stderr.splitlines())] == [True] * 3


def test_all_that_is_written_is_one_object_a_line() -> None:
    out, err, status = run(
        """
print('plain'); print('{"_aws": 1}'); print('{no object}', flush=True)
sys.stderr.write('\\x1b[32m(EngineCore pid=7) ERROR 11-26 of vLLM\\x1b[0m\\n10 %\\r20 %\\r\\n')
subprocess.run([sys.executable, '-c', 'print("of a child"); print(end="without an end")'])
os.write(1, b'\\xff' + b'x' * 70000)
logging.getLogger('handler').warning('of %s', 'ours')
"""
    )
    first, pieces = out[:4], out[4:]  # where a long line is split depends on what the pipe holds when it is read
    assert (first[1], status) == ({"_aws": 1}, 0)
    assert brief([first[0], *first[2:]]) == [("INFO", "plain"), ("INFO", "{no object}"), ("INFO", "of a child")]
    long = "".join(piece["message"] for piece in pieces)
    assert long.startswith("without an end\ufffdxxx")
    assert len(long) == len("without an end") + 70001
    ours = ("WARNING", "of ours")
    assert ours in brief(err)
    written = [("ERROR", "(EngineCore pid=7) ERROR 11-26 of vLLM"), ("INFO", "10 %"), ("INFO", "20 %")]
    assert [line for line in brief(err) if line != ours] == written


def test_nothing_that_is_written_or_closed_ends_the_log() -> None:
    out, err, status = run(
        """
print('a\\0end of output\\0b\\nc', flush=True)
os.close(1)
logging.getLogger('handler').warning('of ours')
"""
    )
    assert (brief(out), brief(err), status) == (
        [("INFO", "a\0end of output\0b"), ("INFO", "c")],
        [("WARNING", "of ours")],
        0,
    )


def test_what_djl_serving_puts_before_its_workers_objects_goes() -> None:
    out, _, _ = run(
        """
print('INFO  PyProcess W-7-model-stdout: {"level": "ERROR", "message": "of the worker"}')
print('WARN  PyProcess W-7-model-stderr: {half')
print('[WARN ] ModelServer of Java')
"""
    )
    words = "WARN  PyProcess W-7-model-stderr: {half"
    assert brief(out) == [("ERROR", "of the worker"), ("WARNING", words), ("WARNING", "[WARN ] ModelServer of Java")]


@pytest.mark.parametrize(
    ("code", "status", "message", "error"),
    [
        ("raise ConfigError('a', 'b')", 2, "cannot start: 2 problems:\n1. a\n2. b", None),
        ("raise KeyError('k')", 1, "uncaught exception: KeyError", "KeyError: 'k'"),
        (
            "import threading; t = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
            0,
            "uncaught exception in t: ZeroDivisionError",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_what_ends_a_process_is_one_object(code: str, status: int, message: str, error: str | None) -> None:
    out, err, ended = run(code)
    (line,) = err
    assert (out, ended, line["message"]) == ([], status, message)
    assert line.get("traceback", "").splitlines()[-1:] == ([error] if error else [])


def test_no_character_of_an_object_ends_or_turns_its_line() -> None:
    text = "a\x7fb\x85c\u2028d\u2029e\u202ef\u2066g\u200bh\ufeffi\U000e0001j\ud800k é 語 \U0001f600"
    record = logging.makeLogRecord({"msg": "%s", "args": (text,), "fields": {f"x{text}": text}})
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert "é 語 \U0001f600" in line, "what can be read stays"
    value = json.loads(line)
    assert (value["message"], value[f"x{text}"]) == (text, text)
    of_child = json.dumps({"a": text}, ensure_ascii=False, indent="\t").replace("\n", "")
    line = JsonFormatter().format(logging.makeLogRecord({"msg": of_child, "is_object": True}))
    assert line.replace("\t", "").isprintable()
    assert json.loads(line) == {"a": text}

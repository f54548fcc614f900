"""Logging as plain text, or as one JSON object per line (`LMI_LOG_FORMAT=json`, or TGI's `JSON_OUTPUT=true`)."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from handler.core.errors import ConfigError, Problem, Problems
from handler.core.framing import is_json
from handler.core.terminal import escaped, unescaped

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMATS = ("text", "json")

log = logging.getLogger("handler")


def wants_json(environ: Mapping[str, str]) -> bool:
    """Return whether the environment enables JSON logs.

    Raises:
        ConfigError: LMI_LOG_FORMAT is neither json nor text.
    """
    value = environ.get("LMI_LOG_FORMAT", "")
    if value and value.lower() not in _FORMATS:
        raise ConfigError(f"environment variable LMI_LOG_FORMAT={value}: must be {' or '.join(_FORMATS)}")
    return value.lower() == "json" or (not value and environ.get("JSON_OUTPUT", "").lower() in ("true", "1"))


def set_up(environ: Mapping[str, str]) -> bool:
    """Send the log records of this process to standard error, and return whether they are written as JSON.

    Raises:
        ConfigError: LMI_LOG_LEVEL or LMI_LOG_FORMAT has an invalid value. Logging then uses the defaults.
    """
    problems, level, as_json = Problems(), environ.get("LMI_LOG_LEVEL", "INFO").upper(), False
    with problems:
        as_json = wants_json(environ)
    if level not in _LEVELS:
        message = f"environment variable LMI_LOG_LEVEL={level}: must be debug, info, warning or error"
        problems.append(Problem("", "", message))
        level = "INFO"
    _configure(level, as_json=as_json)
    for library in ("uvicorn", "httpx", "httpx2"):  # huggingface_hub's client logs a line for each request
        logging.getLogger(library).setLevel(logging.WARNING)
    problems.check()
    return as_json


def set_up_child() -> None:
    """Log the warnings of this child process as JSON if the log of its parent is JSON."""
    if wants_json(os.environ):
        _configure("WARNING", as_json=True)


def format_as_json() -> None:
    """Make the log handlers of the host application write JSON."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())


def of_request(id: str) -> dict[str, dict[str, str]]:
    """Return the `extra` argument for a log record about a request."""
    return {"fields": {"request_id": id}}


def log_trace(logger: logging.Logger, message: str, trace: str) -> None:
    """Log a failure with the traceback of another process."""
    fields = {"message": message, "traceback": trace.rstrip()}
    logger.error("%s\n%s", message, fields["traceback"], extra={"fields": fields})


def log_frequent(
    logger: logging.Logger, message: str, arguments: tuple[Any, ...], fields: Callable[[], Mapping[str, Any]]
) -> None:
    """Log a line at INFO, without a record if the handler of `set_up` alone would write it as text.

    A record would cost several times as much as the line. The caller has checked that the logger is enabled for INFO.

    Args:
        fields: returns the fields of the line for JSON.
    """
    handler = _only_handler(logger)
    if handler is None or not handler.write_text(logger.name, message % arguments):
        extra = {"fields": fields()}
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, arguments, None, extra=extra)
        logger.handle(record)


def _only_handler(logger: logging.Logger) -> _Handler | None:
    """Return the handler of `set_up` if it gets all records of a logger, and if nothing else gets or filters them."""
    if logger.filters:
        return None
    handlers, parent = logger.handlers, logger.parent if logger.propagate else None
    while parent is not None:
        handlers = handlers + parent.handlers if handlers else parent.handlers
        parent = parent.parent if parent.propagate else None
    if len(handlers) != 1 or type(handlers[0]) is not _Handler or handlers[0].filters:
        return None
    return handlers[0]


def _configure(level: str, *, as_json: bool) -> None:
    handler = _Handler(unescaped(sys.stderr))
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler])


class TextFormatter(logging.Formatter):
    """Formats a record as text. The local time is converted once per second, because the conversion is slow."""

    _second = -1
    _time = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return f"{self.second_of(int(record.created))},{int(record.msecs):03d}"

    def second_of(self, second: int) -> str:
        """Return the local time of a second since 1970."""
        if second != self._second:
            self._time = time.strftime(self.default_time_format, time.localtime(second))
            self._second = second
        return self._time


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object with its time, level, logger, message, traceback and `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "is_object", False):
            return _escaped(str(record.msg))
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return _escaped(json.dumps(line, ensure_ascii=False, default=str, allow_nan=False))
        except ValueError:  # a field is NaN, or refers to itself
            return _escaped(json.dumps({name: str(value) for name, value in line.items()}, ensure_ascii=False))


def _escaped(line: str) -> str:
    """Return a JSON text with escapes for all characters that are not printable, such as line separators and controls
    that reverse the direction of text. Those below U+007F can only be outside of strings.
    """
    if line.isprintable():
        return line
    return "".join(c if c < "\x7f" or c.isprintable() else json.dumps(c)[1:-1] for c in line).replace("\x7f", r"\u007f")


def _safe(line: str) -> str:
    return line if line.isprintable() else escaped(line)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has no parameter there
    """Writes each record at once, so that no line is lost when the process ends. The stream is line-buffered."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.stream.write(_safe(self.format(record)) + self.terminator)
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def write_text(self, name: str, message: str) -> bool:
        """Write a line at INFO as `emit` writes the text of a record. Return False if only `emit` can write it."""
        formatter, now = self.formatter, time.time()
        if type(formatter) is not TextFormatter or self.lock is None or self.level > logging.INFO:
            return False
        second = int(now)
        with self.lock:
            milliseconds = int((now - second) * 1000)
            line = f"{formatter.second_of(second)},{milliseconds:03d} INFO {name} {_safe(message)}{self.terminator}"
            try:
                self.stream.write(line)
            except OSError:
                return True  # as in `emit`: the stream's buffer keeps the line, and a second one would repeat it
            except Exception:
                return False
        return True

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # if stderr is closed, nobody would read the error
            super().handleError(record)


# -- output that is not a log record: lines that libraries, a model.py and child processes write -----------------------

_MOST = 1 << 16  # bytes of a line; longer lines are split
_BREAK = re.compile(rb"[\r\n]+")  # progress bars use carriage returns
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LEVEL = re.compile(r"(?:\([^)]*\) )?\W{0,2}(DEBUG|INFO|WARN|WARNING|ERROR|FATAL|CRITICAL)\b")
"""Matches the level in a log line of DJL Serving or vLLM. vLLM may write the process name before the level."""
_STANDARD = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_OF_WORKER = re.compile(r".{0,200}?\bW-\S{0,200}-std(?:out|err): (?={)")
"""Matches the prefix that DJL Serving adds to a JSON line from a worker."""


@contextlib.contextmanager
def captured(as_json: bool = True) -> Iterator[None]:
    """Write every line on stdout and stderr of this process and its children as JSON. Lines that are already JSON stay
    unchanged.

    Log records go directly to stderr. An uncaught exception is logged. After a ConfigError in the block, the process
    exits with status 2.

    Args:
        as_json: whether to capture output, as returned by `set_up`.
    """
    if not as_json:
        yield
        return
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, _Handler)
    stdout = _Handler()
    stdout.setFormatter(handler.formatter)
    relays = [_Relay(1, stdout), _Relay(2, handler)]
    sys.excepthook, threading.excepthook = _log_uncaught, _log_uncaught_in_thread
    try:
        yield
    except ConfigError as error:
        log.error("cannot start: %s", error)
        raise SystemExit(2) from None
    finally:
        for relay in relays:
            relay.close()


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("uncaught exception: %s", kind.__name__, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread else "a thread"
    trace = (failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    log.critical("uncaught exception in %s: %s", name, failure.exc_type.__name__, exc_info=trace)


class _Relay:
    """Reads lines written to a file descriptor. A handler writes them to the original destination."""

    def __init__(self, descriptor: int, handler: _Handler) -> None:
        self._descriptor, self._handler = descriptor, handler
        self._before = os.dup(descriptor)
        handler.setStream(os.fdopen(self._before, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False))
        self._pipe, self._entry = os.pipe()  # kept open, so that closing the descriptor does not end the relay
        self._end = b"\0%s\0" % os.urandom(16).hex().encode()  # a marker that nobody else can write
        os.dup2(self._entry, descriptor)
        self._thread = threading.Thread(target=self._run, name=f"log-{descriptor}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write all received lines, and restore the descriptor. The pipe remains open for surviving child processes."""
        (sys.stdout if self._descriptor == 1 else sys.stderr).flush()
        os.dup2(self._before, self._descriptor)
        os.write(self._entry, self._end)
        os.close(self._entry)
        self._thread.join(5)  # the thread hangs if nobody reads the destination

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        partial, end = b"", b""
        while not end:
            data, end, _ = (partial + os.read(self._pipe, _MOST)).partition(self._end)
            *lines, partial = _BREAK.split(data)
            if end or len(partial) >= _MOST:
                lines, partial = [*lines, partial], b""
            for line in lines:
                self._write(_COLOURS.sub("", line.decode(errors="replace")))

    def _write(self, line: str) -> None:
        prefix = _OF_WORKER.match(line)
        bare = line[prefix.end() :] if prefix else line
        if bare.startswith("{") and bare.rstrip().endswith("}") and is_json(bare):
            self._handler.handle(logging.makeLogRecord({"msg": bare, "is_object": True}))
        elif line.strip():
            match = _LEVEL.match(line)
            level = _STANDARD.get(match[1], match[1]) if match else "INFO"
            self._handler.handle(logging.makeLogRecord({"name": "output", "levelname": level, "msg": line}))

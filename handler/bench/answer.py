"""Read and check one streamed HTTP answer. httptools parses HTTP, so that a token costs little."""

from __future__ import annotations

import json
from array import array

import httptools


class AnswerReader:
    """Reads bytes in any pieces; `complete` at the end of the answer.

    A token is a line of a jsonlines answer, or a `data:` line of an event stream other than `[DONE]`. Only the last one
    is parsed.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""  # a line's beginning
        self._last = b""
        self._events = False
        self._now = 0.0
        self.arrivals = array("d")
        self.complete = False
        self.keep_alive = True

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes that arrived at `now`. Raises `httptools.HttpParserError` if this is no HTTP."""
        self._now = now
        self._parser.feed_data(data)

    def verdict(self, expected_tokens: int) -> str:
        """Return the kind of error; empty if the answer has all its tokens."""
        status = self._parser.get_status_code()
        if status != 200:
            return f"status {status}"
        try:
            last = json.loads(self._last or self._rest)
        except ValueError:
            return "not JSON"
        if not isinstance(last, dict) or "error" in last:
            return "failed in the stream"
        if len(self.arrivals) != expected_tokens:
            return "wrong number of tokens"
        return ""

    # -- what httptools calls ------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._events = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            return  # lines of an error are no tokens
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if self._events:
                if not line.startswith(b"data:"):
                    continue
                line = line[5:].strip()
            if line and line != b"[DONE]":
                self._last = line
                self.arrivals.append(self._now)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()

"""Run `lmi` with a standard error that sends this process a signal in the middle of one write.

Usage: python -m tests.process.http.signalling SIGNAL TEXT serve ... ; the first write that holds TEXT sends SIGNAL.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

from handler.cli import main


class SignallingFile(io.FileIO):
    """Python runs the signal's handler within `write`, while the buffer above it is locked."""

    def __init__(self, fd: int, number: signal.Signals, text: bytes) -> None:
        super().__init__(fd, "w")
        self._number = number
        self._text = text

    def write(self, data: Any, /) -> int:
        if self._text and self._text in bytes(data):
            self._text = b""
            os.kill(os.getpid(), self._number)
        return super().write(data)


if __name__ == "__main__":
    name, text, *arguments = sys.argv[1:]
    raw = SignallingFile(2, signal.Signals[name], text.encode())
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    raise SystemExit(main(arguments))

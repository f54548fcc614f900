"""Tries guides in tests by doing what the guide says."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

from handler.core.values import StructuredOutput
from handler.engines.base import StructuredOutputCheck


def try_guide(structured_output: StructuredOutput) -> int | None:
    """Says on stdout that it runs; then acts as the first word of the guide says, the second being its measure."""
    act, _, more = structured_output.value.partition(" ")
    print(f"a client's own words: {structured_output.value}", flush=True)
    match act:
        case "count":
            with Path(more).open("a") as file:
                file.write(".")
        case "wrong":
            raise ValueError(more)
        case "compute":
            ends = time.process_time() + float(more)
            while time.process_time() < ends:
                pass
        case "sleep":
            time.sleep(float(more))
        case "keep":  # MiB
            return int(more.split()[0]) << 20
        case "memory":
            bytearray(int(more) << 20)
        case "abort":
            os.abort()
        case "overflow":
            overflow()
        case "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(10)
    return None


def overflow() -> None:
    """Use up the stack by glibc's recursive parser of expressions: Python, from 3.14, ends its own recursion before."""
    ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(256), b"(" * 100_000, 1)


def make() -> StructuredOutputCheck:
    return try_guide


class LongPrepared:
    """Prepares itself for longer than a text may take."""

    def __init__(self) -> None:
        self.is_prepared = False

    def prepare(self) -> None:
        try_guide(StructuredOutput("regex", "compute 0.6"))
        self.is_prepared = True

    def __call__(self, structured_output: StructuredOutput) -> int | None:
        assert self.is_prepared
        return try_guide(structured_output)


def long_prepared() -> StructuredOutputCheck:
    return LongPrepared()


def slow_to_make() -> StructuredOutputCheck:
    time.sleep(20)
    return try_guide


def broken() -> StructuredOutputCheck:
    raise OSError("no tokenizer here")

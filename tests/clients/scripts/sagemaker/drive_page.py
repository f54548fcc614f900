"""Runs pieces of code, one after another, as lines of one program."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from common import main

sys.path.insert(0, str(Path(__file__).parents[4]))  # where `deploy.client` is

_sleep = time.sleep
time.sleep = lambda seconds: _sleep(min(float(seconds), 0.05))  # the SDKs look at an endpoint every 5 to 30 s


class Page:
    """`prompt` is code; the answer is what it prints."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "page"}

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(prompt, self._names)
        return printed.getvalue()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        raise NotImplementedError

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        raise NotImplementedError


main(Page())

"""Streams of completions during which something happens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.servers import LiveServer, http


def prompt(number: int) -> list[int]:
    """The prompt of a stream: three ids."""
    return [300 + number, 381, 262]


def during(server: LiveServer, count: int, tokens: int, happen: Callable[[], None]) -> list[list[dict[str, Any]]]:
    """Call `happen` when all have a token; return each stream's values."""
    begun = threading.Barrier(count + 1, timeout=60)

    def stream(number: int) -> list[dict[str, Any]]:
        body = {"prompt": prompt(number), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        values: list[dict[str, Any]] = []
        with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    values.append(json.loads(line.removeprefix("data: ")))
                    if len(values) == 1:
                        begun.wait()
        return values

    with ThreadPoolExecutor(count) as clients:
        streams = [clients.submit(stream, number) for number in range(count)]
        begun.wait()
        happen()
        return [found.result() for found in streams]


def assert_one_error(values: list[dict[str, Any]], words: str) -> None:
    """Whether a stream has tokens and then an error with these words."""
    assert ["error" in value for value in values] == [*[False] * (len(values) - 1), True]
    assert words in values[-1]["error"]["message"]

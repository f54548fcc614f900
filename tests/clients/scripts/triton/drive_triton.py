"""Calls as those make them who have no client library: requests and sseclient-py, as Triton's own tests do, or aiohttp,
as vLLM's benchmark does for its backend `tensorrt-llm`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import requests
import sseclient
from common import main

_SECONDS = 100


class Triton:
    """`options` are what stands beside `text_input`. A refusal is raised with Triton's own text.

    A URL that ends in generate has its streams at generate_stream; another, as /invocations, where its answers are.
    """

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        found = requests.post(url, data=json.dumps({"text_input": prompt, **options}), timeout=_SECONDS)
        _check(found.status_code, found.text)
        assert found.headers["Content-Type"] == "application/json"
        return found.json()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        body = json.dumps({"text_input": prompt, **options})
        headers = {"Accept": "text/event-stream"}
        with requests.post(_streams(url), data=body, headers=headers, stream=True, timeout=_SECONDS) as found:
            if found.status_code != 200:
                _check(found.status_code, found.text.removeprefix("data: "))
            if url.endswith("/generate"):  # DJL before 0.29 sends a rolling batch's answers without one
                assert found.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            for event in sseclient.SSEClient(found).events():
                yield json.loads(event.data)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"text_input": prompt, **options}) as found,
        ):
            _check(found.status, await found.text())
            return await found.json()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        body = {"text_input": prompt, **options}
        async with aiohttp.ClientSession() as session, session.post(_streams(url), json=body) as found:
            if found.status != 200:
                _check(found.status, (await found.text()).removeprefix("data: "))
            async for line in found.content:
                if text := line.strip().decode():
                    yield json.loads(text.removeprefix("data:"))


def _streams(url: str) -> str:
    return f"{url}_stream" if url.endswith("/generate") else url


class Refused(Exception):
    pass


def _check(status: int, text: str) -> None:
    if status != 200:
        raise Refused(f"{status} {json.loads(text)['error']}")


main(Triton())

"""Calls with langchain_huggingface's HuggingFaceEndpoint; answers and events are text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from langchain_huggingface import HuggingFaceEndpoint

_SECONDS = 100


class Langchain:
    """`stop` goes with the call, as chains give it; everything else with the endpoint."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _endpoint(url, options).invoke(prompt, stop=options.get("stop"))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        yield from _endpoint(url, options).stream(prompt, stop=options.get("stop"))

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return await _endpoint(url, options).ainvoke(prompt, stop=options.get("stop"))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for text in _endpoint(url, options).astream(prompt, stop=options.get("stop")):
            yield text


def _endpoint(url: str, options: dict[str, Any]) -> HuggingFaceEndpoint:
    given = {name: value for name, value in options.items() if name != "stop"}
    return HuggingFaceEndpoint(endpoint_url=url, timeout=_SECONDS, **given)


main(Langchain())

"""Calls with text_generation, TGI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from text_generation import AsyncClient, Client

_SECONDS = 100


class TextGeneration:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return Client(url, timeout=_SECONDS).generate(prompt, **options).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        for event in Client(url, timeout=_SECONDS).generate_stream(prompt, **options):
            yield event.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return (await AsyncClient(url, timeout=_SECONDS).generate(prompt, **options)).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for event in AsyncClient(url, timeout=_SECONDS).generate_stream(prompt, **options):
            yield event.model_dump()


main(TextGeneration())

"""Chats with text_generation, TGI's own client; its streams fail at `[DONE]`, also at TGI's: that is their end here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from text_generation import AsyncClient, Client
from text_generation.types import Message

_SECONDS = 100


class TextGeneration:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return Client(url, timeout=_SECONDS).chat(_messages(prompt), **options).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        with contextlib.suppress(json.JSONDecodeError):
            for chunk in Client(url, timeout=_SECONDS).chat(_messages(prompt), stream=True, **options):
                yield chunk.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return (await AsyncClient(url, timeout=_SECONDS).chat(_messages(prompt), **options)).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        with contextlib.suppress(json.JSONDecodeError):
            async for chunk in await AsyncClient(url, timeout=_SECONDS).chat(_messages(prompt), stream=True, **options):
                yield chunk.model_dump()


def _messages(prompt: str) -> list[Message]:
    return [Message(role="user", content=prompt)]


main(TextGeneration())

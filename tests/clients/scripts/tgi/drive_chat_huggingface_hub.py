"""Chats with huggingface_hub's inference clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from common import main
from huggingface_hub import AsyncInferenceClient, InferenceClient

_SECONDS = 100


class HuggingfaceHub:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = InferenceClient(base_url=url, timeout=_SECONDS)
        return _plain(client.chat_completion(_messages(prompt), **options))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        client = InferenceClient(base_url=url, timeout=_SECONDS)  # kept: its stream ends with it
        for chunk in client.chat_completion(_messages(prompt), stream=True, **options):
            yield _plain(chunk)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with AsyncInferenceClient(base_url=url, timeout=_SECONDS) as client:
            return _plain(await client.chat_completion(_messages(prompt), **options))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async with AsyncInferenceClient(base_url=url, timeout=_SECONDS) as client:
            async for chunk in await client.chat_completion(_messages(prompt), stream=True, **options):
                yield _plain(chunk)


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(asdict(value)))


main(HuggingfaceHub())

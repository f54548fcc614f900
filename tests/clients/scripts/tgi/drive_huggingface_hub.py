"""Calls with huggingface_hub's inference clients; an answer is text, or an object where the call asks for details."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

from common import main
from huggingface_hub import AsyncInferenceClient, InferenceClient

_SECONDS = 100


class HuggingfaceHub:
    """One client takes the address as `base_url`, the other as `model`: both are documented."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        client = InferenceClient(base_url=url, timeout=_SECONDS)
        return _plain(client.text_generation(prompt, **options))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        client = InferenceClient(base_url=url, timeout=_SECONDS)  # kept: its stream ends with it
        for event in client.text_generation(prompt, stream=True, **options):
            yield _plain(event)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with AsyncInferenceClient(model=url, timeout=_SECONDS) as client:
            return _plain(await client.text_generation(prompt, **options))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async with AsyncInferenceClient(model=url, timeout=_SECONDS) as client:
            async for event in await client.text_generation(prompt, stream=True, **options):
                yield _plain(event)


def _plain(value: Any) -> Any:
    """Declared fields only: what the library does not know, its users do not read."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


main(HuggingfaceHub())

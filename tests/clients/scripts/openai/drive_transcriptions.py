"""Transcriptions with openai, OpenAI's own client: the prompt is the file in base64, `what` the resource."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from openai import AsyncOpenAI, OpenAI


class Transcriptions:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        with OpenAI(**_client(url)) as client:
            return _plain(getattr(client.audio, what).create(**arguments))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        what, arguments = _asked(prompt, options)
        with OpenAI(**_client(url)) as client:
            for event in getattr(client.audio, what).create(stream=True, **arguments):
                yield _plain(event)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        async with AsyncOpenAI(**_client(url)) as client:
            return _plain(await getattr(client.audio, what).create(**arguments))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        what, arguments = _asked(prompt, options)
        async with AsyncOpenAI(**_client(url)) as client:
            async for event in await getattr(client.audio, what).create(stream=True, **arguments):
                yield _plain(event)


def _plain(found: Any) -> Any:
    """A text, or the name of the client's class and its fields."""
    return found if isinstance(found, str) else [type(found).__name__, found.model_dump()]


def _client(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 100}


def _asked(prompt: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    what = options.pop("what", "transcriptions")
    return what, {"model": "model", "file": ("clip.wav", base64.b64decode(prompt)), **options}


main(Transcriptions())

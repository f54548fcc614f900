"""Chats with openai's client as `Predictor.openai()` makes it: on an endpoint's OpenAI route, with a key of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from common import main

sys.path.insert(0, str(Path(__file__).parents[4]))
from deploy.client import Predictor  # ours, beside what the environment has

os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


class Chat:
    """`url` is the runtime's, `prompt` what the user says; options: `component`, and those of the request."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        completions, request = _asked(url, prompt, options, asynchronous=False)
        return completions.create(**request).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        completions, request = _asked(url, prompt, options, asynchronous=False)
        for chunk in completions.create(stream=True, **request):
            yield chunk.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        completions, request = _asked(url, prompt, options, asynchronous=True)
        return (await completions.create(**request)).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        completions, request = _asked(url, prompt, options, asynchronous=True)
        async for chunk in await completions.create(stream=True, **request):
            yield chunk.model_dump()


def _asked(url: str, prompt: str, options: dict[str, Any], *, asynchronous: bool) -> tuple[Any, dict[str, Any]]:
    predictor = Predictor("local", endpoint_url=url, component=options.pop("component", None))
    client = predictor.openai(asynchronous=asynchronous)
    return client.chat.completions, {"model": "", "messages": [{"role": "user", "content": prompt}], **options}


main(Chat())

"""Calls with litellm's provider for Triton, or the one that `provider` names; answers and events are text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import litellm
from common import main

litellm.telemetry = False
litellm.suppress_debug_info = True  # it goes to stdout, which is the driver's


class Litellm:
    """A prompt is the one message; the provider lays it out as its text."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return litellm.completion(**_asked(url, prompt, options)).choices[0].message.content

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        for chunk in litellm.completion(**_asked(url, prompt, options), stream=True):
            yield chunk.choices[0].delta.content or ""

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return (await litellm.acompletion(**_asked(url, prompt, options))).choices[0].message.content

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for chunk in await litellm.acompletion(**_asked(url, prompt, options), stream=True):
            yield chunk.choices[0].delta.content or ""


def _asked(url: str, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    provider = options.pop("provider", "triton")
    messages, key = [{"role": "user", "content": prompt}], {} if provider == "triton" else {"api_key": "none"}
    limits = {"num_retries": 0, "max_retries": 0, "timeout": 100}
    return {"model": f"{provider}/model", "messages": messages, "api_base": url, **limits, **key, **options}


main(Litellm())

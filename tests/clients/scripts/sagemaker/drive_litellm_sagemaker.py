"""Calls with litellm's providers for SageMaker: `sagemaker` (TGI's form) and `sagemaker_chat` (OpenAI's)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import litellm
from common import main

litellm.telemetry = False
litellm.suppress_debug_info = True  # advice with every error


class LitellmSagemaker:
    """`url` is the runtime's; options: `provider`, `endpoint`, and those of the request. `tools` give calls back."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _plain(litellm.completion(**_asked(url, prompt, options, stream=False)))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        for chunk in litellm.completion(**_asked(url, prompt, options, stream=True)):
            yield chunk.choices[0].delta.content or ""

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _plain(await litellm.acompletion(**_asked(url, prompt, options, stream=False)))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for chunk in await litellm.acompletion(**_asked(url, prompt, options, stream=True)):
            yield chunk.choices[0].delta.content or ""


def _asked(url: str, prompt: str, options: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    path = "invocations-response-stream" if stream else "invocations"
    endpoint = options.pop("endpoint", "local")
    return {
        "model": f"{options.pop('provider')}/local",
        "messages": [{"role": "user", "content": prompt}],
        "sagemaker_base_url": f"{url}/endpoints/{endpoint}/{path}",
        "aws_region_name": "us-east-1",
        "aws_access_key_id": "x",
        "aws_secret_access_key": "x",
        "num_retries": 0,
        "timeout": 100,
        "stream": stream,
        **options,
    }


def _plain(answer: Any) -> dict[str, Any]:
    message = answer.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return {"content": message.content, "calls": calls, "tokens": answer.usage.completion_tokens}


main(LitellmSagemaker())

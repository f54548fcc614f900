"""Calls with anthropic, Anthropic's own client: `what` among the options is called, the rest are its arguments.

The client checks every answer and event against its types, and raises where one does not fit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from anthropic._models import validate_type
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from common import main

_TYPES = {"message": Message, "error": ErrorResponse}


class AnthropicClient:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        if what == "check":
            return [_checked(value) for value in arguments["values"]]
        with Anthropic(**_client(url)) as client:
            if what == "count":
                return client.messages.count_tokens(**arguments).model_dump()
            if what == "gathered":
                with client.messages.stream(**arguments) as stream:
                    return stream.get_final_message().model_dump()
            return client.messages.create(**arguments).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        _, arguments = _asked(prompt, options)
        with Anthropic(**_client(url)) as client:
            for event in client.messages.create(stream=True, **arguments):
                yield event.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        if what == "check":
            return [_checked(value) for value in arguments["values"]]
        async with AsyncAnthropic(**_client(url)) as client:
            if what == "count":
                return (await client.messages.count_tokens(**arguments)).model_dump()
            if what == "gathered":
                async with client.messages.stream(**arguments) as stream:
                    return (await stream.get_final_message()).model_dump()
            return (await client.messages.create(**arguments)).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        _, arguments = _asked(prompt, options)
        async with AsyncAnthropic(**_client(url)) as client:
            async for event in await client.messages.create(stream=True, **arguments):
                yield event.model_dump()


def _checked(value: dict[str, Any]) -> str:
    """Hold a value against the client's type for it; return the type's name."""
    kind: Any = _TYPES.get(value.get("type", ""), RawMessageStreamEvent) if "type" in value else MessageTokensCount
    return type(validate_type(type_=kind, value=value)).__name__


def _client(url: str) -> dict[str, Any]:
    return {
        "base_url": url, "api_key": "none", "max_retries": 0, "timeout": 100, "_strict_response_validation": True,
    }  # fmt: skip


def _asked(prompt: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    what = options.pop("what", "message")
    if what == "check":
        return what, options
    limit = {} if what == "count" else {"max_tokens": 24}
    return what, {"model": "model", "messages": [{"role": "user", "content": prompt}], **limit, **options}


main(AnthropicClient())

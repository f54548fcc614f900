"""Calls with openai's Responses API; the client checks every answer and event against its types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai._models import validate_type
from openai.types.responses import InputTokenCountResponse, Response, ResponseStreamEvent

_LENIENT: dict[str, Any] = {"_extra_kwargs": {"_strict_response_validation": False}}
"""For compacted conversations, whose messages of the user are not of the types that the client names."""


class Responses:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if "values" in options:
            return [_checked(value) for value in options["values"]]
        with OpenAI(**_client(url)) as client:
            if options.pop("counted", False):
                return client.responses.input_tokens.count(model="model", input=prompt, **options).model_dump()
            if options.pop("compacted", False):
                return (
                    client.with_options(**_LENIENT)
                    .responses.compact(model="model", input=prompt, **options)
                    .model_dump()
                )
            if options.pop("stored", False):
                return _stored(client, _asked(prompt, options))
            if options.pop("gathered", False):
                with client.responses.stream(**_asked(prompt, options)) as stream:
                    return stream.get_final_response().model_dump()
            return client.responses.create(**_asked(prompt, options)).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        with OpenAI(**_client(url)) as client:
            for event in client.responses.create(stream=True, **_asked(prompt, options)):
                yield event.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if "values" in options:
            return [_checked(value) for value in options["values"]]
        async with AsyncOpenAI(**_client(url)) as client:
            if options.pop("counted", False):
                counted = await client.responses.input_tokens.count(model="model", input=prompt, **options)
                return counted.model_dump()
            if options.pop("compacted", False):
                compacted = client.with_options(**_LENIENT).responses.compact(model="model", input=prompt, **options)
                return (await compacted).model_dump()
            if options.pop("stored", False):
                return await _stored_async(client, _asked(prompt, options))
            if options.pop("gathered", False):
                async with client.responses.stream(**_asked(prompt, options)) as stream:
                    return (await stream.get_final_response()).model_dump()
            return (await client.responses.create(**_asked(prompt, options))).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async with AsyncOpenAI(**_client(url)) as client:
            async for event in await client.responses.create(stream=True, **_asked(prompt, options)):
                yield event.model_dump()


def _stored(client: OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    """Two turns by id, what the first one was asked, and what is left of it when it is deleted."""
    first = client.responses.create(**asked)
    second = client.responses.create(**asked, previous_response_id=first.id)
    found = client.responses.retrieve(first.id)
    items = [item.model_dump() for item in client.responses.input_items.list(first.id, order="asc")]
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except NotFoundError as error:
        gone = error.body
    return {
        "turns": [first.model_dump(), second.model_dump()],
        "found": found.model_dump(),
        "items": items,
        "gone": gone,
    }


async def _stored_async(client: AsyncOpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    first = await client.responses.create(**asked)
    second = await client.responses.create(**asked, previous_response_id=first.id)
    found = await client.responses.retrieve(first.id)
    items = [item.model_dump() async for item in client.responses.input_items.list(first.id, order="asc")]
    await client.responses.delete(first.id)
    try:
        await client.responses.retrieve(first.id)
    except NotFoundError as error:
        gone = error.body
    return {
        "turns": [first.model_dump(), second.model_dump()],
        "found": found.model_dump(),
        "items": items,
        "gone": gone,
    }


def _checked(value: dict[str, Any]) -> str:
    """Hold a value against the client's type for it; return the type's name."""
    kind: Any = ResponseStreamEvent if "type" in value else Response if "id" in value else InputTokenCountResponse
    return type(validate_type(type_=kind, value=value)).__name__


def _client(url: str) -> dict[str, Any]:
    return {
        "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 100,
        "_strict_response_validation": True,
    }  # fmt: skip


def _asked(prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"model": "model", "input": prompt, "max_output_tokens": 24, **options}


main(Responses())

"""Calls with openai, OpenAI's own client: `what` among the options is called, the rest are its arguments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class Capital(BaseModel):
    country: str
    city: str


class OpenAi:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        with OpenAI(**_client(url)) as client:
            if what == "models":
                return [model.id for model in client.models.list()]
            if what == "model":
                return client.models.retrieve(prompt).model_dump()
            if what == "parse":
                found = client.chat.completions.parse(response_format=Capital, **arguments)
                return found.choices[0].message.parsed.model_dump()
            if what == "gathered":
                with client.chat.completions.stream(**arguments) as stream:
                    stream.until_done()
                    return stream.get_final_completion().model_dump()
            call = client.completions if what == "completion" else client.chat.completions
            return call.create(**arguments).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        what, arguments = _asked(prompt, options)
        with OpenAI(**_client(url)) as client:
            call = client.completions if what == "completion" else client.chat.completions
            for chunk in call.create(stream=True, **arguments):
                yield chunk.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        async with AsyncOpenAI(**_client(url)) as client:
            if what == "models":
                return [model.id async for model in client.models.list()]
            if what == "model":
                return (await client.models.retrieve(prompt)).model_dump()
            if what == "parse":
                found = await client.chat.completions.parse(response_format=Capital, **arguments)
                return found.choices[0].message.parsed.model_dump()
            if what == "gathered":
                async with client.chat.completions.stream(**arguments) as stream:
                    return (await stream.get_final_completion()).model_dump()
            if what == "leave":  # after the second chunk
                chunks = await client.chat.completions.create(stream=True, **arguments)
                found = [await anext(chunks) for _ in range(2)]
                await chunks.close()
                return [chunk.choices[0].delta.content for chunk in found]
            call = client.completions if what == "completion" else client.chat.completions
            return (await call.create(**arguments)).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        what, arguments = _asked(prompt, options)
        async with AsyncOpenAI(**_client(url)) as client:
            call = client.completions if what == "completion" else client.chat.completions
            async for chunk in await call.create(stream=True, **arguments):
                yield chunk.model_dump()


def _client(url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 100}


def _asked(prompt: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    what = options.pop("what", "chat")
    ask = (
        {"prompt": options.pop("prompts", prompt)}
        if what == "completion"
        else {"messages": [{"role": "user", "content": prompt}]}
    )
    return what, {"model": "model", **ask, **options}


main(OpenAi())

"""Runs pydantic-ai's Agent on OpenAI's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str
    country: str


class PydanticAi:
    """Options: `city` (the answer is one, by a tool call), and model settings."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _plain(_agent(url, options).run_sync(prompt, model_settings=options))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        agent = _agent(url, options)
        yield from agent.run_stream_sync(prompt, model_settings=options).stream_text(delta=True, debounce_by=None)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _plain(await _agent(url, options).run(prompt, model_settings=options))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async with _agent(url, options).run_stream(prompt, model_settings=options) as result:
            async for text in result.stream_text(delta=True, debounce_by=None):
                yield text


def _agent(url: str, options: dict[str, Any]) -> Any:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    output: Any = City if options.pop("city", False) else str
    return Agent(OpenAIChatModel("model", provider=provider), output_type=output, retries=0)


def _plain(result: Any) -> dict[str, Any]:
    output = result.output
    return {
        "output": output.model_dump() if isinstance(output, BaseModel) else output,
        "tools": [part.tool_name for part in result.response.parts if part.part_kind == "tool-call"],
        "tokens": result.usage.output_tokens,
        "prompt_tokens": result.usage.input_tokens,
    }


main(PydanticAi())

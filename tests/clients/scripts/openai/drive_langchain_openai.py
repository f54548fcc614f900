"""Calls with langchain_openai's ChatOpenAI; `tools` and `tool_choice` among the options are bound to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from common import main
from langchain_openai import ChatOpenAI


class LangchainOpenAi:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        return _plain(_chat(url, options).invoke(prompt))

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        for chunk in _chat(url, options).stream(prompt):
            yield _plain(chunk)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        async with httpx.AsyncClient() as client:  # its own would be another event loop's
            return _plain(await _chat(url, {**options, "http_async_client": client}).ainvoke(prompt))

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async with httpx.AsyncClient() as client:
            async for chunk in _chat(url, {**options, "http_async_client": client}).astream(prompt):
                yield _plain(chunk)


def _chat(url: str, options: dict[str, Any]) -> Any:
    tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="model", max_retries=0, timeout=30, **options)
    return chat.bind_tools(tools, tool_choice=choice) if tools else chat


def _plain(message: Any) -> dict[str, Any]:
    return {
        "content": message.content,
        "tool_calls": [{"name": call["name"], "args": call["args"]} for call in message.tool_calls],
        "finish_reason": message.response_metadata.get("finish_reason"),
        "tokens": message.usage_metadata and message.usage_metadata["output_tokens"],
    }


main(LangchainOpenAi())

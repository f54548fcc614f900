"""Calls with llama_index's OpenAILike, as docs/client.md has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


class LlamaIndex:
    """With the option `chat` a prompt is a message, else a completion's."""

    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        llm, messages = _llm(url, prompt, options)
        return llm.chat(messages).message.content if messages else llm.complete(prompt).text

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        llm, messages = _llm(url, prompt, options)
        for event in llm.stream_chat(messages) if messages else llm.stream_complete(prompt):
            yield event.delta

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        llm, messages = _llm(url, prompt, options)
        return (await llm.achat(messages)).message.content if messages else (await llm.acomplete(prompt)).text

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        llm, messages = _llm(url, prompt, options)
        events = await (llm.astream_chat(messages) if messages else llm.astream_complete(prompt))
        async for event in events:
            yield event.delta


def _llm(url: str, prompt: str, options: dict[str, Any]) -> tuple[Any, list[ChatMessage]]:
    chat = options.pop("chat", False)
    llm = OpenAILike(
        model="model", api_base=f"{url}/v1", api_key="none", is_chat_model=chat, max_retries=0, timeout=100, **options
    )
    return llm, [ChatMessage(role="user", content=prompt)] if chat else []


main(LlamaIndex())

"""Calls with langchain_openai's ChatOpenAI, or langchain_anthropic's ChatAnthropic.

Options: `dialect` (chat, responses, messages), `tools` and `tool_choice`, which are bound to it, `stop`, `result`
(the `text` that a tool found, for another turn, whose options are in `then`), and the model's own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from langchain_core.messages import HumanMessage, ToolMessage


class Langchain:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        result, stop = options.pop("result", None), options.pop("stop", None)
        chat, turns = _chat(url, options), [HumanMessage(prompt)]
        answer = chat.invoke(turns, stop=stop)
        if result is not None:
            answer = _chat(url, options | result["then"]).invoke([*turns, answer, *_results(answer, result["text"])])
        return _plain(answer)

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        stop = options.pop("stop", None)
        for chunk in _chat(url, options).stream(prompt, stop=stop):
            yield _plain(chunk)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        result, stop = options.pop("result", None), options.pop("stop", None)
        chat, turns = _chat(url, options), [HumanMessage(prompt)]
        answer = await chat.ainvoke(turns, stop=stop)
        if result is not None:
            answer = await _chat(url, options | result["then"]).ainvoke(
                [*turns, answer, *_results(answer, result["text"])]
            )
        return _plain(answer)

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        stop = options.pop("stop", None)
        async for chunk in _chat(url, options).astream(prompt, stop=stop):
            yield _plain(chunk)


def _chat(url: str, options: dict[str, Any]) -> Any:
    given = {"api_key": "none", "model": "model", "max_retries": 0, "timeout": 100, **options}
    tools, choice, dialect = (given.pop(name, None) for name in ("tools", "tool_choice", "dialect"))
    if dialect == "messages":
        from langchain_anthropic import ChatAnthropic

        chat: Any = ChatAnthropic(base_url=url, **given)
    else:
        from langchain_openai import ChatOpenAI

        if dialect == "responses":
            given |= {"use_responses_api": True, "output_version": "responses/v1"}
        elif dialect == "chat":
            given["stream_usage"] = True
        chat = ChatOpenAI(base_url=f"{url}/v1", **given)
    return chat.bind_tools(tools, tool_choice=choice) if tools else chat


def _results(answer: Any, result: str) -> list[ToolMessage]:
    return [ToolMessage(result, tool_call_id=call["id"]) for call in answer.tool_calls]


def _plain(message: Any) -> dict[str, Any]:
    metadata = message.response_metadata
    return {
        "content": message.content,
        "tool_calls": [{"name": call["name"], "args": call["args"]} for call in message.tool_calls],
        "finish_reason": metadata.get("finish_reason") or metadata.get("stop_reason") or metadata.get("status"),
        "tokens": message.usage_metadata and message.usage_metadata["output_tokens"],
        "prompt_tokens": message.usage_metadata and message.usage_metadata["input_tokens"],
        "parts": [part for block in message.content_blocks if (part := _part(block))],
    }


def _part(block: Any) -> list[Any] | None:
    """A piece as [kind, text, name]; of a call, the text is that of its arguments."""
    match block["type"]:
        case "reasoning" | "text" as kind:
            return [kind, block.get(kind, ""), None]
        case "tool_call":
            return ["call", json.dumps(block["args"]), block["name"]]
        case "tool_call_chunk":
            return ["call", block["args"] or "", block["name"]]
    return None


main(Langchain())

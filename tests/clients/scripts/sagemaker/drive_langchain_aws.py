"""Calls with langchain_aws's SagemakerEndpoint and ChatSagemakerEndpoint; the content handlers are the user's part."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from langchain_aws.chat_models.sagemaker_endpoint import ChatModelContentHandler, ChatSagemakerEndpoint
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler, SagemakerEndpoint
from langchain_core.messages import AIMessage, AIMessageChunk

os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_MAX_ATTEMPTS": "1"}


class Text(LLMContentHandler):
    """LMI's lines and whole answers."""

    content_type = accepts = "application/json"

    def __init__(self, *, stream: bool) -> None:
        self._more = {"stream": True} if stream else {}

    def transform_input(self, prompt: str, model_kwargs: dict[str, Any]) -> bytes:
        return json.dumps({"inputs": prompt, "parameters": model_kwargs, **self._more}).encode()

    def transform_output(self, output: Any) -> str:
        value = json.loads(output if isinstance(output, bytes) else output.read())
        if "error" in value:
            raise ValueError(value["error"])
        return str(value["token"]["text"] if "token" in value else value["generated_text"])


class Chat(ChatModelContentHandler):
    """OpenAI's form of a chat, by LMI's lines or its whole answer."""

    content_type = accepts = "application/json"

    def __init__(self, *, stream: bool) -> None:
        self._more = {"stream": True} if stream else {}

    def transform_input(self, prompt: Any, model_kwargs: dict[str, Any]) -> bytes:
        return json.dumps({"messages": prompt, **model_kwargs, **self._more}).encode()

    def transform_output(self, output: Any) -> Any:
        value = json.loads(output if isinstance(output, bytes) else output.read())
        (choice,) = value["choices"]
        if "delta" in choice:
            return AIMessageChunk(content=choice["delta"].get("content") or "")
        return AIMessage(content=choice["message"]["content"])


class LangchainAws:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        answer = _model(url, options, stream=False).invoke(prompt)
        return getattr(answer, "content", answer)

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        for piece in _model(url, options, stream=True).stream(prompt):
            yield getattr(piece, "content", piece)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        answer = await _model(url, options, stream=False).ainvoke(prompt)
        return getattr(answer, "content", answer)

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        async for piece in _model(url, options, stream=True).astream(prompt):
            yield getattr(piece, "content", piece)


def _model(url: str, options: dict[str, Any], *, stream: bool) -> Any:
    given = {"endpoint_name": options.pop("endpoint", "local"), "region_name": "us-east-1", "streaming": stream}
    if options.pop("chat", False):
        return ChatSagemakerEndpoint(**given, base_url=url, content_handler=Chat(stream=stream), model_kwargs=options)
    return SagemakerEndpoint(**given, endpoint_url=url, content_handler=Text(stream=stream), model_kwargs=options)


main(LangchainAws())

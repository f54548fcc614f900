"""Runs pydantic-ai's Agent on OpenAI's routes, and its models' requests on OpenAI's and Anthropic's.

Options: `city` (the answer is one, by a tool call), and model settings. With a `dialect` (chat, responses, messages) it
is one request of the model: `tools`, and `result` (the `text` that a tool found, for another turn, with `then`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from common import main
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRequest, ToolDefinition, ToolReturnPart
from pydantic_ai.direct import model_request, model_request_stream, model_request_stream_sync, model_request_sync
from pydantic_ai.messages import TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str
    country: str


class PydanticAi:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if "dialect" not in options:
            return _plain(_agent(url, options).run_sync(prompt, model_settings=options))
        result, (model, messages, arguments) = options.pop("result", None), _asked(url, prompt, options)
        answer = model_request_sync(model, messages, **arguments)
        if result is not None:
            answer = model_request_sync(
                model,
                [*messages, answer, _results(answer, result["text"])],
                **arguments | {"model_settings": result["then"]},
            )
        return _whole(answer)

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        if "dialect" not in options:
            agent = _agent(url, options)
            yield from agent.run_stream_sync(prompt, model_settings=options).stream_text(delta=True, debounce_by=None)
            return
        model, messages, arguments = _asked(url, prompt, options)
        with model_request_stream_sync(model, messages, **arguments) as stream:
            yield from ({"parts": []} for _ in stream)
            yield _whole(stream.response)

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        if "dialect" not in options:
            return _plain(await _agent(url, options).run(prompt, model_settings=options))
        result, (model, messages, arguments) = options.pop("result", None), _asked(url, prompt, options)
        answer = await model_request(model, messages, **arguments)
        if result is not None:
            answer = await model_request(
                model,
                [*messages, answer, _results(answer, result["text"])],
                **arguments | {"model_settings": result["then"]},
            )
        return _whole(answer)

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        if "dialect" not in options:
            async with _agent(url, options).run_stream(prompt, model_settings=options) as result:
                async for text in result.stream_text(delta=True, debounce_by=None):
                    yield text
            return
        model, messages, arguments = _asked(url, prompt, options)
        async with model_request_stream(model, messages, **arguments) as stream:
            async for _ in stream:
                yield {"parts": []}
            yield _whole(stream.get())


def _model(url: str, dialect: str) -> Any:
    if dialect == "messages":
        return AnthropicModel("model", provider=AnthropicProvider(base_url=url, api_key="none"))
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatModel
    return kind("model", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def _agent(url: str, options: dict[str, Any]) -> Any:
    output: Any = City if options.pop("city", False) else str
    return Agent(_model(url, "chat"), output_type=output, retries=0)


def _asked(url: str, prompt: str, options: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    model = _model(url, options.pop("dialect"))
    tools = [ToolDefinition(**tool) for tool in options.pop("tools", ())]
    if "stop" in options:
        options["stop_sequences"] = options.pop("stop")
    parameters = ModelRequestParameters(function_tools=tools, allow_text_output=True)
    return (
        model,
        [ModelRequest.user_text_prompt(prompt)],
        {"model_settings": options, "model_request_parameters": parameters},
    )


def _results(answer: Any, result: str) -> ModelRequest:
    calls = [part for part in answer.parts if isinstance(part, ToolCallPart)]
    return ModelRequest([ToolReturnPart(call.tool_name, result, call.tool_call_id) for call in calls])


def _plain(result: Any) -> dict[str, Any]:
    output = result.output
    return {
        "output": output.model_dump() if isinstance(output, BaseModel) else output,
        "tools": [part.tool_name for part in result.response.parts if part.part_kind == "tool-call"],
        "tokens": result.usage.output_tokens,
        "prompt_tokens": result.usage.input_tokens,
    }


def _whole(answer: Any) -> dict[str, Any]:
    return {
        "parts": [_part(part) for part in answer.parts],
        "finish_reason": answer.finish_reason,
        "tokens": answer.usage.output_tokens,
        "prompt_tokens": answer.usage.input_tokens,
    }


def _part(part: Any) -> list[Any]:
    """A part as [kind, text, name]; of a call, the text is that of its arguments."""
    if isinstance(part, ToolCallPart):
        return ["call", part.args_as_json_str() if part.args else "", part.tool_name]
    raw = "".join((part.provider_details or {}).get("raw_content", ())) if isinstance(part, ThinkingPart) else ""
    return ["text" if isinstance(part, TextPart) else "reasoning", part.content or raw, None]


main(PydanticAi())

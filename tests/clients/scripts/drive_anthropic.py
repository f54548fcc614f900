"""Calls with anthropic, Anthropic's own client: `what` among the options is called, the rest are its arguments.

The client checks every answer and event against its types, and raises where one does not fit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from anthropic import Anthropic, AsyncAnthropic, beta_async_tool, beta_tool
from anthropic._models import validate_type
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from common import main

_TYPES = {"message": Message, "error": ErrorResponse}


def weather(city: str) -> str:
    """The weather.

    Args:
        city: its name
    """
    return f"12 °C in {city}"


def clock(city: str) -> str:
    """The time.

    Args:
        city: its name
    """
    return f"12:00 in {city}"


class AnthropicClient:
    def generate(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        if what == "check":
            return [_checked(value) for value in arguments["values"]]
        with Anthropic(**_client(url)) as client:
            if what == "models":
                listed = [model.id for model in client.models.list(limit=1)]  # it asks for each page
                return [client.models.retrieve(id).display_name for id in listed]
            if what == "capabilities":
                kinds: list[Any] = [client.models, client.beta.models]
                return [kind.retrieve("model").capabilities.model_dump() for kind in kinds]
            if what == "count":
                return client.messages.count_tokens(**arguments).model_dump()
            if what == "runner":
                added = [beta_tool(clock)] if arguments.pop("adds", False) else []
                runner = client.beta.messages.tool_runner(tools=[beta_tool(weather)], **arguments)
                turns = []
                for message in runner:
                    turns.append(_answered(message, _calls(message) and runner.generate_tool_call_response()))
                    _add(runner, added)
                return turns
            if what == "gathered":
                with client.messages.stream(**arguments) as stream:
                    return stream.get_final_message().model_dump()
            if what == "beta":
                return client.beta.messages.create(**arguments).model_dump()
            if what == "beta_count":
                return client.beta.messages.count_tokens(**arguments).model_dump()
            if what == "beta_gathered":
                with client.beta.messages.stream(**arguments) as stream:
                    seen = [event.type for event in stream]
                    return {**stream.get_final_message().model_dump(), "events": seen}
            return client.messages.create(**arguments).model_dump()

    def stream(self, url: str, prompt: str, options: dict[str, Any]) -> Iterator[Any]:
        what, arguments = _asked(prompt, options)
        with Anthropic(**_client(url)) as client:
            if what == "runner":
                added = [beta_tool(clock)] if arguments.pop("adds", False) else []
                runner = client.beta.messages.tool_runner(tools=[beta_tool(weather)], stream=True, **arguments)
                for stream in runner:
                    message = stream.get_final_message()
                    yield _answered(message, _calls(message) and runner.generate_tool_call_response())
                    _add(runner, added)
                return
            for event in client.messages.create(stream=True, **arguments):
                yield event.model_dump()

    async def generate_async(self, url: str, prompt: str, options: dict[str, Any]) -> Any:
        what, arguments = _asked(prompt, options)
        if what == "check":
            return [_checked(value) for value in arguments["values"]]
        async with AsyncAnthropic(**_client(url)) as client:
            if what == "models":
                listed = [model.id async for model in client.models.list(limit=1)]
                return [(await client.models.retrieve(id)).display_name for id in listed]
            if what == "capabilities":
                kinds: list[Any] = [client.models, client.beta.models]
                return [(await kind.retrieve("model")).capabilities.model_dump() for kind in kinds]
            if what == "count":
                return (await client.messages.count_tokens(**arguments)).model_dump()
            if what == "runner":
                added = [beta_async_tool(_clock)] if arguments.pop("adds", False) else []
                runner = client.beta.messages.tool_runner(tools=[beta_async_tool(_weather)], **arguments)
                turns = []
                async for message in runner:
                    turns.append(_answered(message, _calls(message) and await runner.generate_tool_call_response()))
                    _add(runner, added)
                return turns
            if what == "gathered":
                async with client.messages.stream(**arguments) as stream:
                    return (await stream.get_final_message()).model_dump()
            if what == "beta":
                return (await client.beta.messages.create(**arguments)).model_dump()
            if what == "beta_count":
                return (await client.beta.messages.count_tokens(**arguments)).model_dump()
            if what == "beta_gathered":
                async with client.beta.messages.stream(**arguments) as stream:
                    seen = [event.type async for event in stream]
                    return {**(await stream.get_final_message()).model_dump(), "events": seen}
            return (await client.messages.create(**arguments)).model_dump()

    async def stream_async(self, url: str, prompt: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        what, arguments = _asked(prompt, options)
        async with AsyncAnthropic(**_client(url)) as client:
            if what == "runner":
                added = [beta_async_tool(_clock)] if arguments.pop("adds", False) else []
                runner = client.beta.messages.tool_runner(tools=[beta_async_tool(_weather)], stream=True, **arguments)
                async for stream in runner:
                    message = await stream.get_final_message()
                    yield _answered(message, _calls(message) and await runner.generate_tool_call_response())
                    _add(runner, added)
                return
            async for event in await client.messages.create(stream=True, **arguments):
                yield event.model_dump()


async def _weather(city: str) -> str:
    return weather(city)


async def _clock(city: str) -> str:
    return clock(city)


_weather.__name__, _weather.__doc__ = weather.__name__, weather.__doc__
_clock.__name__, _clock.__doc__ = clock.__name__, clock.__doc__


def _add(runner: Any, tools: list[Any]) -> None:
    """Add the tools to a runner in the middle of its conversation, and choose the first of them from now on."""
    if tools:
        runner.add_tools(*tools)
        choice = {"type": "tool", "name": tools[0].name}
        runner.set_messages_params(lambda params: {**params, "tool_choice": choice})
        tools.clear()


def _calls(message: Any) -> bool | None:
    """Whether the runner calls tools by itself, as it does for this reason only."""
    return True if message.stop_reason == "tool_use" else None


def _answered(message: Any, results: Any) -> dict[str, Any]:
    """An answer, and what the client's tools said to its calls."""
    return {"message": message.model_dump(), "results": results}


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
    limit = {} if what in ("count", "beta_count") else {"max_tokens": 24}
    return what, {"model": "model", "messages": [{"role": "user", "content": prompt}], **limit, **options}


main(AnthropicClient())
